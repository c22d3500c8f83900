"""The engine core without its sockets: messages in, messages out.

``EngineCore`` owns the scheduler, and nothing else: every message that reaches the engine process
becomes a call here, and every answer is a returned value. So a test drives a whole engine by plain
calls, and the process (``zlm.engine.process``) is only the loop around it.

Promise: each submitted sequence gets exactly one terminal row or error, whatever happens.
"""

from collections.abc import Iterator, Sequence

from zlm.config import Resolved
from zlm.engine.grammar_queue import GrammarQueue
from zlm.engine.kv_groups import KVGroups
from zlm.engine.limits import SchedulerLimits
from zlm.engine.news import refused
from zlm.engine.no_kv import NoKV
from zlm.engine.prefix_cache import BlockHasher
from zlm.engine.scheduler import Scheduler
from zlm.engine.stats import Statistics
from zlm.errors import ConfigError, Overloaded, ZlmError
from zlm.messages import (
    OWNER_SHIFT,
    Abort,
    EngineReady,
    Execute,
    Masks,
    StepOutput,
    StepResult,
    Submit,
    TokenBytes,
    WorkerReady,
)
from zlm.metrics import EngineStats
from zlm.process.counts import CountPage

Outputs = list[tuple[int, StepOutput]]  # (index of the tokenizer, its message)


class EngineCore:
    """One engine: sequences in, steps out, results in, tokens out."""

    def __init__(
        self,
        resolved: Resolved,
        num_blocks: Sequence[int],
        *,
        hasher: BlockHasher | None = None,
        verify: bool = False,
        page: CountPage | None = None,
    ) -> None:
        """Build pools of ``num_blocks[g]`` blocks (null block included) for each KV group.

        *hasher* is for tests that want a fixed hash key. With *verify* the token ids of every
        prefix hit are compared with those that were cached. What is counted is kept in *page*.
        Raises ConfigError if not even one block can be had.
        """
        config = resolved.config
        spec = resolved.spec
        pooling = spec.pooling
        limits = SchedulerLimits(
            max_model_len=resolved.max_model_len,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            vocab_size=resolved.spec.vocab_size,
            eos_ids=resolved.spec.eos_token_ids,
            chunked_prefill=config.scheduler.enable_chunked_prefill and not spec.bidirectional,
            by_priority=config.scheduler.policy == "priority",
            # A mean needs the hidden states of all tokens; an encoder keeps nothing.
            prefix_caching=config.cache.enable_prefix_caching
            and not spec.bidirectional
            and (pooling is None or pooling.kind == "last"),
            stages=config.parallel.pipeline_parallel_size,
            verify=verify,
        )
        block_size, slots = config.cache.block_size_tokens, limits.max_num_seqs
        windows = [group.window_tokens for group in resolved.kv_groups]
        if windows:
            kv = KVGroups(windows, num_blocks, block_size, slots, keep_contents=verify)
        else:
            kv = NoKV(block_size, slots)
        if kv.min_free() < 1:
            raise ConfigError(
                f"the KV cache has no room ({list(num_blocks)} blocks): give it more with "
                "--kv-cache-memory-bytes or --gpu-memory-utilization"
            )
        statistics = Statistics(limits.max_model_len, page)
        self.scheduler = Scheduler(limits, kv, hasher or BlockHasher(), statistics)
        self._grammars = GrammarQueue(resolved.spec.vocab_size)
        self._run_ahead = max(config.scheduler.run_ahead_steps, limits.stages)
        self._max_waiting = config.scheduler.max_waiting_seqs

    # ------------------------------------------------------------------ messages in

    def submit(self, message: Submit) -> Outputs:
        """Queue a prompt; the outputs are its refusal, if it can never run.

        One with a grammar waits until that is compiled, see ``take_compiled``.
        """
        overload = self._overload(message.n)
        if overload is not None:
            self.scheduler.statistics.refused(message.n)
            return refused(message, overload).outputs()
        if message.grammar is not None:
            self._grammars.put(message)
            return []
        return self.scheduler.submit(message).outputs()

    def _overload(self, count: int) -> ZlmError | None:
        """Return why *count* more sequences may not wait, or None.

        Those that free slots have room for do not count as waiting.
        """
        most = self._max_waiting
        if most is None:
            return None
        scheduler = self.scheduler
        waiting = scheduler.num_waiting + len(self._grammars) + count
        if waiting <= most + scheduler.limits.max_num_seqs - scheduler.num_running:
            return None
        message = f"the queue is full: {most} sequences may wait, which is the limit; try again"
        return Overloaded(message, code="queue_full")

    def learn(self, message: TokenBytes) -> None:
        """Take in the vocabulary that grammars are compiled for."""
        self._grammars.learn(message)

    @property
    def num_compiling(self) -> int:
        """Prompts that wait for their grammar: ``take_compiled`` must be called again soon."""
        return len(self._grammars)

    def take_compiled(self, now: float) -> Outputs:
        """Queue the prompts whose grammar is compiled by now; the outputs are their refusals."""
        outputs: Outputs = []
        for done in self._grammars.take():
            if isinstance(done.result, ZlmError):
                self.scheduler.statistics.refused(done.submit.n)
                outputs += refused(done.submit, done.result).outputs()
                continue
            outputs += self.scheduler.submit(done.submit, done.result).outputs()
            if done.aborted:
                outputs += self.scheduler.abort(Abort(done.aborted), now).outputs()
        return outputs

    def abort(self, message: Abort, now: float) -> Outputs:
        """End sequences; the outputs are their terminal rows (later, if they are compiled for)."""
        if self._grammars:
            message = Abort(self._grammars.abort(message.seq_ids))
        return self.scheduler.abort(message, now).outputs()

    def abandon(self, owner: int, now: float) -> None:
        """End all sequences of tokenizer number *owner*, which is dead: there are no outputs."""
        unfinished = self._grammars.waiting() + self.scheduler.unfinished()
        self.abort(Abort([each for each in unfinished if each >> OWNER_SHIFT == owner]), now)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; return how many blocks were found by one.

        Running sequences keep their blocks, which nobody else will find.
        """
        return self.scheduler.kv.forget_all()

    def apply(self, message: StepResult, now: float) -> Outputs:
        """Take in the result of the oldest step in flight; the outputs are its news."""
        return self.scheduler.apply(message, now).outputs()

    # ------------------------------------------------------------------ messages out

    def next_steps(self, now: float) -> Iterator[Execute | Masks]:
        """Plan the steps to send now, so that ``run_ahead_steps`` of them are in flight.

        Each is planned when it is asked for: the first can be on its way before the second is.
        Masks come as soon as they are known: while the step that they are of runs.
        """
        masks = self.scheduler.take_masks()
        if masks is not None:
            yield masks
        while self.scheduler.num_in_flight < self._run_ahead:
            step = self.scheduler.plan(now)
            if step is None:
                return
            yield step
            masks = self.scheduler.take_masks()
            if masks is not None:
                yield masks

    def ready(self, device: str, dtype: str) -> EngineReady:
        """Return what tokenizers must know."""
        return EngineReady(
            num_blocks=[pool.num_usable for pool in self.scheduler.kv.pools],
            max_sequence_tokens=self.scheduler.max_sequence_tokens,
            device=device,
            dtype=dtype,
        )

    def count_in(self, page: CountPage) -> None:
        """Count in *page* from now on; what was counted before is forgotten."""
        self.scheduler.statistics.count_in(page)
        self.show_gauges()

    def show_gauges(self) -> None:
        """Put the gauges of the moment beside what is counted."""
        scheduler = self.scheduler
        scheduler.statistics.show(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._grammars),
            kv_usage=scheduler.kv.usage(),
            num_blocks=max((pool.num_usable for pool in scheduler.kv.pools), default=0),
            block_size_tokens=scheduler.kv.block_size,
            steps_in_flight=scheduler.num_in_flight,
        )

    def stats(self) -> EngineStats:
        """Return counters and gauges as they are now."""
        self.show_gauges()
        return self.scheduler.statistics.value()

    # ------------------------------------------------------------------ idleness

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is unfinished and no step in flight."""
        return not (self.scheduler.has_work or self._grammars)

    def close(self) -> None:
        """Give up what is being compiled."""
        self._grammars.close()

    def check_idle(self) -> None:
        """Raise InvariantError if a block or a slot is still held although the engine is idle."""
        self.scheduler.check_idle()


def fewest_blocks(workers: Sequence[WorkerReady]) -> list[int]:
    """Return the blocks of each KV group that all workers have."""
    return [min(counts) for counts in zip(*(w.num_blocks for w in workers), strict=True)]
