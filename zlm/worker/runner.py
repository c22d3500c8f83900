"""What executes steps, as the worker's loop sees it: on a GPU several steps can be in flight."""

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
