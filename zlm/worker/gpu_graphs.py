"""CUDA graphs of steps: captured once a shape, replayed with one launch.

``StepGraphs.run`` does a step of a given shape and form by replaying its graph. A shape that comes
for the first time runs without one; the second time it is captured, so that nothing is captured for
what happens once. All graphs share one memory pool, since only one runs at a time: capture the
largest first, and the others find their memory in its pool. Owns graphs, knows nothing of models.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from zlm.worker.gpu_steps import StepShape

log = logging.getLogger("zlm.worker")

MAX_GRAPHS = 256  # of any shape and form; steps beyond run without
Key = tuple[StepShape, str]


class StepGraphs:
    """Owns the graphs of *body*, which launches a step of a shape in a form and syncs nothing."""

    def __init__(self, body: Callable[[StepShape, str], object], *, eager: bool) -> None:
        """*eager*: never capture."""
        self._body = body
        self._eager = eager
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._seen: set[Key] = set()
        self._refused: set[Key] = set()  # there was no memory for them
        self._pool = None if eager else torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._graphs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run steps without graphs, and remember no shape, while in this context."""
        eager, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = eager

    def run(self, shape: StepShape, form: str) -> None:
        """Launch the step on the current stream."""
        key = (shape, form)
        graph = self._graphs.get(key)
        if graph is None and not self._wanted(key):
            self._body(shape, form)
            return
        if graph is None:
            graph = self.capture(shape, form)
        if graph is None:
            self._body(shape, form)
        else:
            graph.replay()

    def nearest(self, shape: StepShape, form: str, most_padding: int) -> StepShape | None:
        """Return the smallest captured shape that *shape*, with prefill, can be run in.

        It has at most *most_padding* tokens more. None if there is no such graph.
        """
        if (shape, form) in self._graphs:
            return shape
        most = shape.num_tokens + most_padding
        holding = [
            captured
            for captured, its_form in self._graphs
            if its_form == form and captured.num_tokens <= most and captured.holds(shape)
        ]
        return min(holding, key=lambda captured: captured.num_tokens, default=None)

    def takes(self, shape: StepShape, form: str) -> bool:
        """Tell whether a graph of it may be made, and there is none."""
        has_room = not self._eager and len(self._graphs) < MAX_GRAPHS
        key = (shape, form)
        return has_room and key not in self._graphs and key not in self._refused

    def _wanted(self, key: Key) -> bool:
        if not self.takes(*key):
            return False
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

    def capture(self, shape: StepShape, form: str) -> torch.cuda.CUDAGraph | None:
        """Capture a step. Its kernels must have been compiled: run it once before.

        None if there is no memory for it: steps like it are never captured then.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            self._body(shape, form)
        except BaseException as error:
            with suppress(RuntimeError):  # of ending a capture that has failed
                graph.capture_end()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            log.warning("no memory for a graph of %s, %s: such steps run without", shape, form)
            self._refused.add((shape, form))
            return None
        graph.capture_end()
        self._graphs[shape, form] = graph
        log.debug("captured %s, %s", shape, form)
        return graph
