"""What executes steps, as the worker's loop sees it: on a GPU several steps can be in flight."""

from collections import deque
from typing import Protocol

from zlm.messages import Execute, Masks, StepResult


class Runner(Protocol):
    """Executes steps strictly in the order of their launches."""

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched that has not been collected and waits for no masks."""

    @property
    def awaits_masks(self) -> bool:
        """Whether the last step launched waits for its masks: no other can be launched before."""

    def launch(self, message: Execute) -> None:
        """Apply the changes in *message* and launch its rows."""

    def mask(self, masks: Masks) -> None:
        """Let the step that waits for *masks* sample."""

    def done(self) -> bool:
        """Tell whether the oldest step in flight has ended."""

    def collect(self) -> StepResult:
        """Return the result of the oldest step in flight; waits for it."""

    def use_idle_time(self) -> bool:
        """Do a little (tens of milliseconds) of what can wait; return whether more is left.

        Called when no step is in flight and no message waits.
        """


class EndedSteps:
    """What a runner is whose steps have ended once they are launched, as on a CPU.

    Owns the results that have not been collected.
    """

    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched that has not been collected."""
        return bool(self._results)

    def done(self) -> bool:
        """Tell whether the oldest step launched has ended."""
        return True

    def collect(self) -> StepResult:
        """Return the result of the oldest step launched."""
        return self._results.popleft()

    def use_idle_time(self) -> bool:
        """Do nothing: nothing can wait."""
        return False
