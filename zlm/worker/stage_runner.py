"""Steps in a stage of a pipeline before the last: computed, and passed on, but not sampled.

``StageRunner`` stands in the runner's place and takes from each step what only the last stage does:
samples, masks, log-probabilities. What was sampled comes back with a later step (``tokens``).
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from zlm.messages import Execute, Masks, SamplingSpec, StepResult
from zlm.worker.runner import Runner

PLAIN = SamplingSpec(seed=0, temperature=0.0)


class WholeRunner(Runner, Protocol):
    """A runner as the warm-up needs it, too."""

    def execute(self, message: Execute) -> StepResult:
        """Run a step and wait for it."""

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV blocks, each (group, from, to)."""


class StageRunner:
    """A runner around *runner*."""

    def __init__(self, runner: WholeRunner) -> None:
        self._runner = runner
        self.done = runner.done
        self.collect = runner.collect
        self.copy_blocks = runner.copy_blocks
        self.use_idle_time = runner.use_idle_time

    @property
    def in_flight(self) -> bool:
        return self._runner.in_flight

    @property
    def awaits_masks(self) -> bool:
        return False

    def launch(self, message: Execute) -> None:
        self._runner.launch(_unsampled(message))

    def execute(self, message: Execute) -> StepResult:
        return self._runner.execute(_unsampled(message))

    def mask(self, masks: Masks) -> None:
        """Do nothing: they are for the last stage."""


def _unsampled(message: Execute) -> Execute:
    joins = [msgspec.structs.replace(join, sampling=PLAIN) for join in message.joins]
    nothing = bytes(len(message.sample))
    return msgspec.structs.replace(message, sample=nothing, masked=False, joins=joins)
