"""Drives an EngineCore and a FakeWorker by plain calls, and judges what comes out.

``Engine`` is the loop of the engine process without sockets: the test says when steps are sent,
when a result is delivered, and what is submitted or aborted in between. It keeps what every
sequence was told and compares it, when all is over, with the same sequence generated alone.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from fake_worker import FakeWorker, chain, generate_alone, logprob
from specs import small_spec

from zlm.config import (
    CacheOptions,
    Config,
    KVGroup,
    ModelOptions,
    Resolved,
    SchedulerOptions,
)
from zlm.engine.core import EngineCore, Outputs
from zlm.engine.grammar import GrammarCompiler
from zlm.engine.prefix_cache import BlockHasher
from zlm.messages import (
    FINISH_ABORT,
    OWNER_SHIFT,
    RUNNING,
    Abort,
    Execute,
    Grammar,
    LogprobColumns,
    Masks,
    SamplingSpec,
    SequenceError,
    StepResult,
    Submit,
    TokenBytes,
)

VOCAB, EOS = 29, 3

# Tokens 4 to 28 are the letters a to y, the others stand for nothing.
TOKENS = TokenBytes(
    data=bytes(range(ord("a"), ord("z"))),
    ends=np.array([0] * 4 + list(range(1, 26)), np.int32).tobytes(),
    special_ids=np.array([0, 1, 2, 3], np.int32).tobytes(),
    eos_ids=np.array([EOS], np.int32).tobytes(),
)


@dataclass
class Told:
    """What one sequence was told."""

    submit: Submit
    sample: int
    tokens: list[int] = field(default_factory=list)
    finish: int = RUNNING
    error: SequenceError | None = None
    aborted: bool = False
    cached: int = 0
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # of all samples

    @property
    def over(self) -> bool:
        return self.finish != RUNNING or self.error is not None


def make_resolved(
    *,
    windows: tuple[int, ...] = (0,),
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    run_ahead: int = 2,
    prefix_caching: bool = True,
    chunked: bool = True,
    policy: str = "fcfs",
    vocab_size: int = VOCAB,
    eos_ids: tuple[int, ...] = (EOS,),
    max_waiting_seqs: int | None = None,
) -> Resolved:
    """Return a configuration of the engine core; what it does not read is nominal."""
    config = Config(
        model=ModelOptions(model="none"),
        cache=CacheOptions(block_size_tokens=block_size, enable_prefix_caching=prefix_caching),
        scheduler=SchedulerOptions(
            enable_chunked_prefill=chunked,
            policy="priority" if policy == "priority" else "fcfs",
            run_ahead_steps=run_ahead,
            max_waiting_seqs=max_waiting_seqs,
        ),
    )
    spec = small_spec(
        vocab_size=vocab_size,
        num_layers=len(windows),
        max_position=max_model_len,
        eos_token_ids=eos_ids,
    )
    return Resolved(
        config=config,
        spec=spec,
        model_path="",
        tokenizer_path="",
        served_names=("none",),
        device="cpu",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_groups=tuple(
            KVGroup(layers=(layer,), window_tokens=window, num_kv_heads=1, head_dim=1)
            for layer, window in enumerate(windows)
        ),
    )


class Engine:
    """An engine core with a fake worker. Time goes on by one second an event."""

    def __init__(self, num_blocks: int | tuple[int, ...] = 17, **options) -> None:
        self.resolved = make_resolved(**options)
        windows = tuple(group.window_tokens for group in self.resolved.kv_groups)
        blocks = num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(windows)
        self.core = EngineCore(self.resolved, blocks, hasher=BlockHasher(b"fixed"), verify=True)
        self.scheduler = self.core.scheduler
        self.worker = FakeWorker(
            windows=windows,
            num_blocks=blocks,
            block_size=self.resolved.config.cache.block_size_tokens,
            num_slots=self.resolved.max_num_seqs,
            max_model_len=self.resolved.max_model_len,
            vocab_size=self.resolved.spec.vocab_size,
            max_num_batched_tokens=self.resolved.max_num_batched_tokens,
        )
        self.told: dict[int, Told] = {}
        self.pending: deque[StepResult] = deque()
        self.held: deque[Execute] = deque()  # wait for masks, or behind one that does
        self.compiles_later = False  # the test calls ``take_compiled``
        self.now = 0.0
        self._next_id = 1

    # ------------------------------------------------------------------ actions

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        owner: int = 0,
        priority: int = 0,
        salt: bytes = b"",
        logprobs: int = -1,
        prompt_logprobs: int = -1,
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        mask: bool = True,
        grammar: Grammar | None = None,
    ) -> int:
        """Submit a prompt and return the id of its first sequence.

        Without *mask* the worker samples stop ids before min_tokens, for the engine to pass over.
        """
        seq_id = owner << OWNER_SHIFT | self._next_id
        self._next_id += n
        sampling = SamplingSpec(
            seed=self._next_id * 1000,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            min_tokens=min_tokens,
            banned_until_min=np.array([EOS, *stop_ids] if mask else [], np.int32).tobytes(),
        )
        message = Submit(
            seq_id=seq_id,
            arrival=self._tick(),
            token_ids=np.array(prompt, np.int32).tobytes(),
            max_tokens=max_tokens,
            sampling=sampling,
            n=n,
            stop_token_ids=list(stop_ids),
            ignore_eos=ignore_eos,
            priority=priority,
            cache_salt=salt,
            grammar=grammar,
        )
        for sample in range(n):
            self.told[seq_id + sample] = Told(message, sample)
            self.told[seq_id + sample].prompt_logprobs = self.told[seq_id].prompt_logprobs
        if grammar is not None:
            self.core.learn(TOKENS)
        self._hear(self.core.submit(message))
        while self.core.num_compiling and not self.compiles_later:
            self._hear(self.core.take_compiled(self._tick()))
        return seq_id

    def abort(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            told = self.told.get(seq_id)
            if told is not None and not told.over:
                told.aborted = True
        self._hear(self.core.abort(Abort(list(seq_ids)), self._tick()))
        assert self.core.num_compiling or all(
            self.told[seq_id].over for seq_id in seq_ids if seq_id in self.told
        )

    def send(self) -> int:
        """Send as many steps as may be in flight; return how many were sent."""
        steps = list(self.core.next_steps(self._tick()))
        for step in steps:
            if isinstance(step, Masks):
                self.pending.append(self.worker.execute(self.held.popleft(), step))
            else:
                self.held.append(step)
            while self.held and not self.held[0].masked:
                self.pending.append(self.worker.execute(self.held.popleft()))
        assert len(self.held) + len(self.pending) <= self.resolved.config.scheduler.run_ahead_steps
        if self.scheduler.has_work:
            assert self.pending, "the engine has work and does nothing"
        return sum(isinstance(step, Execute) for step in steps)

    def deliver(self) -> bool:
        """Deliver the oldest result, if any."""
        if not self.pending:
            return False
        self._hear(self.core.apply(self.pending.popleft(), self._tick()))
        return True

    def run(self, most: int = 10_000) -> None:
        """Work until idle, then check every promise."""
        for _ in range(most):
            self.send()
            self.check()
            if not self.deliver():
                break
        self.judge()

    def check(self) -> None:
        """Check the books, and that the prefix cache holds what its keys stand for."""
        self.scheduler.check()
        if self.held:  # what was sent has not all been computed
            return
        for pool, written in zip(self.scheduler.kv.pools, self.worker.written, strict=True):
            for block in range(1, pool.num_usable + 1):
                contents = pool.contents(block)
                assert contents is None or contents == written[block].tobytes()

    # ------------------------------------------------------------------ judgement

    def judge(self) -> None:
        """All is over: compare every sequence with itself generated alone."""
        assert self.core.is_idle and not self.pending
        self.core.check_idle()
        self.check()
        for told in self.told.values():
            self._judge(told)

    def _judge(self, told: Told) -> None:
        submit = told.submit
        assert told.over, "a sequence without a terminal row"
        if told.error is not None:
            return
        grammar = None
        if submit.grammar is not None:
            compiled = GrammarCompiler(TOKENS, VOCAB).compile(submit.grammar)
            grammar = compiled.fork(ignore_eos=submit.ignore_eos)
        vocab_size = self.worker.vocab_size
        alone, finish = generate_alone(submit, told.sample, vocab_size, (EOS,), grammar)
        if told.aborted:
            assert told.finish == FINISH_ABORT
            assert told.tokens == alone[: len(told.tokens)]
        else:
            assert (told.tokens, told.finish) == (alone, finish)
        num_prompt = len(submit.token_ids) // 4
        assert 0 <= told.cached < max(2, num_prompt)
        last = self.worker.last_sampled.get(submit.sampling.seed + told.sample, 0)
        assert last < num_prompt + submit.max_tokens, "a row beyond max_tokens"
        prompt = np.frombuffer(submit.token_ids, np.int32).tolist()
        expected = expected_logprobs([*prompt, *told.tokens], submit.sampling)
        if submit.sampling.logprobs >= 0:
            assert told.logprobs == expected[0][num_prompt:]
        else:
            assert told.logprobs == []
        if submit.sampling.prompt_logprobs >= 0:  # once a prompt, whichever sample computes it
            want = expected[1][1:num_prompt]
            assert told.prompt_logprobs == want[: len(told.prompt_logprobs)]
            assert told.aborted or told.prompt_logprobs == want
        else:
            assert told.prompt_logprobs == []

    def errors(self) -> list[SequenceError]:
        return [told.error for told in self.told.values() if told.error is not None]

    # ------------------------------------------------------------------ inside

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def _hear(self, outputs: Outputs) -> None:
        owners = [owner for owner, _ in outputs]
        assert len(set(owners)) == len(owners), "two messages to one tokenizer from one step"
        for owner, output in outputs:
            ids = np.frombuffer(output.seq_ids, np.int64).tolist()
            tokens = np.frombuffer(output.token_ids, np.int32).tolist()
            finish = np.frombuffer(output.finish, np.uint8).tolist()
            for seq_id, token, code in zip(ids, tokens, finish, strict=True):
                told = self.told[seq_id]
                assert seq_id >> OWNER_SHIFT == owner
                assert not told.over, "news of a sequence that is over"
                if token >= 0:
                    told.tokens.append(token)
                told.finish = code
            for row, cached in output.cached:
                assert len(self.told[ids[row]].tokens) <= 1
                self.told[ids[row]].cached = cached
            for row, line in lines(output.logprobs):
                self.told[ids[row]].logprobs.append(line)
            for row, line in lines(output.prompt_logprobs):
                self.told[ids[row]].prompt_logprobs.append(line)
            for error in output.errors:
                told = self.told[error.seq_id]
                assert error.seq_id >> OWNER_SHIFT == owner and not told.over
                told.error = error


def lines(columns: LogprobColumns | None) -> list[tuple[int, list[tuple[int, float]]]]:
    """Return (row, [(id, logprob), ...]) of each described token."""
    if columns is None:
        return []
    counts = np.frombuffer(columns.counts, np.int32)
    ends = np.cumsum(counts)
    ids = np.frombuffer(columns.ids, np.int32).tolist()
    values = np.frombuffer(columns.values, np.float32).tolist()
    assert ends[-1] == len(ids) == len(values)
    return [
        (row, list(zip(ids[end - count : end], values[end - count : end], strict=True)))
        for row, count, end in zip(
            np.frombuffer(columns.rows, np.int32).tolist(), counts.tolist(), ends, strict=True
        )
    ]


def expected_logprobs(
    tokens: list[int], sampling: SamplingSpec
) -> tuple[list[list[tuple[int, float]]], list[list[tuple[int, float]]]]:
    """Return, for each position, what is reported of its token when sampled and in a prompt."""
    value, sampled, prompt = 0, [], []
    for token in tokens:
        for report, most in ((sampled, sampling.logprobs), (prompt, sampling.prompt_logprobs)):
            ids = [token, *range(max(most, 0))]
            report.append([(i, logprob(value, i)) for i in ids])
        value = chain(value, token)
    return sampled, prompt
