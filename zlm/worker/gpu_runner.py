"""Steps on a GPU: launched without waiting, collected when they have ended.

``GpuRunner`` applies the messages of the engine core strictly in order and never waits for the
device but for prompt log-probabilities. Everything is on one stream, so the order of launches is
the order of effects:

    joins, table entries, block copies → the step's array → graph → copy of the samples to the host

Steps are launched ahead of those that still run. A *steady* step, of the same decodes as the step
before it, needs no array: the graph has left the one before ready for it.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Execute, LogprobColumns, Masks, StepResult
from zlm.models.registry import Model
from zlm.ops.backend import Ops
from zlm.worker import gpu_steps, step_inputs, token_masks
from zlm.worker.gpu_copy import Downloads, download
from zlm.worker.gpu_graphs import StepGraphs
from zlm.worker.gpu_program import HostLengths, StepProgram, statuses_at
from zlm.worker.gpu_sampler import GpuSampler, MaskedSamples
from zlm.worker.gpu_sampler_report import Report
from zlm.worker.gpu_steps import StepShape, StepSizes
from zlm.worker.gpu_tables import GpuTables
from zlm.worker.group_caches import copies_by_group
from zlm.worker.prompt_logprobs import PromptLogprobs
from zlm.worker.step_inputs import StepRows


@dataclass(frozen=True, slots=True)
class _Sampling:
    """What is known of a step's samples on the host."""

    shape: StepShape
    form: str
    chosen: np.ndarray  # which samples the step asks for, in message order
    slots: np.ndarray  # of these


@dataclass(slots=True)
class _Running:
    """A step that was launched; or its logits, if its masks are to come."""

    step: int
    launched: float
    sampling: _Sampling | None = None
    samples: Tensor | None = None  # host uint8: see ``StepProgram.samples``
    report: Report | None = None
    reported: list[Tensor] = field(default_factory=list)
    prompt: LogprobColumns | None = None
    ended: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Steady:
    """The step that the array on the device is ready for."""

    slots: bytes
    starts: bytes
    sample: bytes
    masked: bool
    sampling: _Sampling

    def fits(self, message: Execute) -> bool:
        """Tell whether *message* is that step, with no sequence joining."""
        same = message.starts == self.starts and message.slots == self.slots
        alike = message.sample == self.sample and message.masked == self.masked
        return same and alike and not message.joins

    def advance(self) -> None:
        self.starts = (np.frombuffer(self.starts, np.int32) + np.int32(1)).tobytes()


class GpuRunner:
    """Owns everything on the device; ``caches`` holds one tensor a layer."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        caches: list[Tensor],
        tables: GpuTables,
        sampler: GpuSampler,
        *,
        group_layers: Sequence[Sequence[int]],
        windows: Sequence[int],
        vocab_size: int,
        sizes: StepSizes,
        max_num_batched_tokens: int,
        captured_tokens: int,
        eager: bool = False,
        samples: bool = True,
    ) -> None:
        """*captured_tokens*: of prompts in a step; steps with more run without a graph.

        samples: False in a stage before the last.
        """
        self._ops = ops
        self._caches = caches
        self._tables = tables
        self._sampler = sampler
        self._group_layers = [list(layers) for layers in group_layers]
        self._sizes = sizes
        self._captured_tokens = captured_tokens
        device = tables.tokens.device
        self._on_gpu = device.type == "cuda"
        self._program = StepProgram(
            model,
            caches,
            tables,
            sampler,
            list(windows),
            vocab_size=vocab_size,
            sizes=sizes,
            max_num_batched_tokens=max_num_batched_tokens,
            pdl=ops.pdl,
            samples=samples,
        )
        self.graphs = StepGraphs(self._program.launch, eager=eager or not self._on_gpu)
        self._prompt = PromptLogprobs(model, vocab_size, device)
        self._downloads = Downloads(5 * sizes.max_samples, device)
        self._steady: _Steady | None = None
        self._running: deque[_Running] = deque()
        self._unsampled: _Running | None = None
        self._vocab_size = vocab_size
        self._form = "draw" if samples else "silent"  # of a usual step
        self.spare_shapes: deque[tuple[StepShape, str]] = deque()  # to be captured in idle time
        self.most_padding = 0  # tokens that a captured step may have beyond one that is not
        self._last_end = 0.0

    # ------------------------------------------------------------------------------ steps

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched that has not been collected and waits for no masks."""
        return bool(self._running)

    @property
    def awaits_masks(self) -> bool:
        """Whether the last step launched waits for its masks."""
        return self._unsampled is not None

    @torch.inference_mode()
    def launch(self, message: Execute) -> None:
        """Apply the changes in *message* and launch its rows, up to the logits if it is masked."""
        assert self._unsampled is None, "the step before has not sampled yet"
        running = _Running(message.step, time.perf_counter())
        self._tables.apply(message)
        if message.joins:
            self._sampler.join(message.joins)
        if message.copies:
            self.copy_blocks(message.copies)
        steady = self._steady
        if steady is not None and steady.fits(message):
            self.graphs.run(steady.sampling.shape, steady.sampling.form)
            steady.advance()
            self._sample(steady.sampling, running, masked=message.masked)
        elif message.slots:
            self._launch_rows(message, running)
        if not message.masked:
            self._launched(running)

    @torch.inference_mode()
    def mask(self, masks: Masks) -> None:
        """Launch the sampling of the step that waits for *masks*."""
        running, self._unsampled = self._unsampled, None
        assert running is not None and running.step == masks.step, "masks of another step"
        assert running.sampling is not None, "it was launched"
        self._sample_fully(running.sampling, running, masks)
        self._download(running.sampling, running)
        self._launched(running)

    def _launched(self, running: _Running) -> None:
        if self._on_gpu:
            running.ended = torch.cuda.Event()
            running.ended.record()
        self._running.append(running)

    def done(self) -> bool:
        """Tell whether the oldest step in flight has ended."""
        ended = self._running[0].ended
        return ended is None or ended.query()

    def collect(self) -> StepResult:
        """Return the result of the oldest step in flight; waits for it."""
        running = self._running.popleft()
        if running.ended is not None:
            running.ended.synchronize()
        token_ids, status, reported = b"", b"", None
        if running.samples is not None and running.sampling is not None:
            token_ids, status = _read_samples(running.samples, running.sampling)
            self._downloads.give_back(running.samples)
            if running.report is not None:
                chosen = running.sampling.chosen
                reported = running.report.columns(running.reported, chosen)
        now = time.perf_counter()
        began, self._last_end = max(running.launched, self._last_end), now
        return StepResult(
            step=running.step,
            token_ids=token_ids,
            status=status,
            logprobs=reported,
            prompt_logprobs=running.prompt,
            seconds=now - began,
        )

    def execute(self, message: Execute, masks: Masks | None = None) -> StepResult:
        """Launch one step and wait for it; none may be in flight."""
        assert not self._running
        self.launch(message)
        if masks is not None:
            self.mask(masks)
        return self.collect()

    @torch.inference_mode()
    def use_idle_time(self) -> bool:
        """Capture one of the shapes in ``spare_shapes``; return whether some are left."""
        assert not self._running
        while self.spare_shapes:
            shape, form = self.spare_shapes.popleft()
            if self._captures(shape, form):
                self.rehearse(shape, form)
                break
        return bool(self.spare_shapes)

    @torch.inference_mode()
    def rehearse(self, shape: StepShape, form: str = "") -> None:
        """Run a step of padding alone, and capture it if it can be and has not been.

        form: empty for that of a usual step.
        """
        form = form or self._form
        self._steady = None
        self._program.load(gpu_steps.blank(shape, self._tables.dummy_slot))
        none = [0] * shape.num_rows
        self._program.launch(shape, form, (none, none))
        if self._captures(shape, form):
            self.graphs.capture(shape, form)

    def _captures(self, shape: StepShape, form: str) -> bool:
        return self._can_capture(shape) and self.graphs.takes(shape, form)

    def _can_capture(self, shape: StepShape) -> bool:
        """Whether *shape* is not too large, and needs no lengths, which no two steps share."""
        if shape.prefill_tokens > self._captured_tokens:
            return False
        return not (self._ops.needs_lengths and shape.prefill_rows)

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV blocks, each (group, from, to), in all layers of their groups."""
        for layers, sources, targets in copies_by_group(copies, self._group_layers):
            self._ops.copy_blocks([self._caches[layer] for layer in layers], sources, targets)

    # ------------------------------------------------------------------------------ launching

    def _launch_rows(self, message: Execute, running: _Running) -> None:
        rows = step_inputs.read(message)
        sampled = rows.sampled_slots
        form = self._sampler.variant(sampled) if len(sampled) else "silent"
        if message.masked or form is None:
            form = "logits"
        shape = self._sizes.shape(rows)
        if shape.prefill_rows and self.most_padding:
            shape = self.graphs.nearest(shape, form, self.most_padding) or shape
        array, chosen = gpu_steps.fill(rows, shape, self._tables.dummy_slot)
        self._program.load(array)
        sampling = _Sampling(shape, form, chosen, sampled)
        hidden, self._steady = None, None
        wants_prompt = self._prompt.wanted(rows, self._sampler)
        if wants_prompt or not self._can_capture(shape):
            lengths = _host_lengths(rows, shape)
            hidden = self._program.launch(shape, form, lengths, all_tokens=wants_prompt)
        else:
            self.graphs.run(shape, form)
            if not shape.prefill_rows:
                self._steady = _Steady(
                    message.slots, message.starts, message.sample, message.masked, sampling
                )
                self._steady.advance()
        self._sample(sampling, running, masked=message.masked)
        if wants_prompt and hidden is not None:
            places = gpu_steps.padded_index(rows, shape, np.arange(rows.num_tokens))
            running.prompt = self._prompt.columns(
                rows, places, hidden, self._tables.tokens, self._sampler
            )

    def _sample(self, sampling: _Sampling, running: _Running, *, masked: bool) -> None:
        """Launch what of the sampling the step's graph has not done, and the copy of samples."""
        running.sampling = sampling
        if masked:
            self._unsampled = running
            return
        if sampling.form == "logits":
            self._sample_fully(sampling, running, None)
        if sampling.form != "silent":
            self._download(sampling, running)

    def _download(self, sampling: _Sampling, running: _Running) -> None:
        samples = self._program.samples(sampling.shape.samples)
        running.samples = self._downloads.begin(samples)

    def _sample_fully(self, sampling: _Sampling, running: _Running, masks: Masks | None) -> None:
        shape, chosen = sampling.shape, sampling.chosen
        inputs = self._program.inputs(shape)
        tokens, status = self._program.outputs(shape.samples)
        # Without prefill the array is the next step's by now: it starts where this one samples.
        lengths = inputs.sample_lengths if shape.prefill_rows else inputs.starts[: shape.samples]
        slots = np.full(shape.samples, self._tables.dummy_slot)
        slots[chosen] = sampling.slots
        masked = None
        if masks is not None and masks.rows:
            places, words = token_masks.read(masks, self._vocab_size)
            masked = MaskedSamples(chosen[places], words)
        report = self._sampler.full(
            self._program.logits(shape.samples),
            inputs.sample_slots,
            lengths,
            slots,
            tokens_out=tokens,
            status_out=status,
            masked=masked,
        )
        if report is not None:
            running.report = report
            running.reported = [download(tensor) for tensor in report.tensors]


def _read_samples(samples: Tensor, sampling: _Sampling) -> tuple[bytes, bytes]:
    """Return token ids and statuses of the samples asked for; no statuses when all are fine."""
    array, count = samples.numpy(), sampling.shape.samples
    token_ids = array[: 4 * count].view(np.int32)[sampling.chosen].tobytes()
    status = array[statuses_at(count) :][sampling.chosen]
    return token_ids, status.tobytes() if status.any() else b""


def _host_lengths(rows: StepRows, shape: StepShape) -> HostLengths:
    """Return tokens and context of each row of the padded step."""
    counts = np.zeros(shape.num_rows, np.int64)
    lengths = np.zeros(shape.num_rows, np.int64)
    counts[: shape.decodes] = lengths[: shape.decodes] = 1
    places = np.arange(len(rows.slots))
    places[rows.num_decodes :] += shape.decodes - rows.num_decodes
    counts[places] = rows.counts
    lengths[places] = rows.starts + rows.counts
    return counts.tolist(), lengths.tolist()
