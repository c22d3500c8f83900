"""Which steps are captured; CUDA itself is played by a fake."""

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from zlm.worker import gpu_graphs
from zlm.worker.gpu_graphs import StepGraphs
from zlm.worker.gpu_steps import StepSizes

SHAPES = [StepSizes(8).decodes(rows) for rows in (1, 2, 4)]


class FakeGraph:
    """Ends a capture badly if its body has failed, as CUDA does."""

    log: ClassVar[list[str]]
    failed: ClassVar[bool]

    def capture_begin(self, **_: object) -> None:
        self.log.append("begin")
        FakeGraph.failed = False

    def capture_end(self) -> None:
        self.log.append("end")
        if FakeGraph.failed:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    FakeGraph.log = []
    return FakeGraph.log


def test_a_shape_is_captured_when_it_comes_again(log: list[str]) -> None:
    graphs = StepGraphs(lambda shape, form: log.append("body"), eager=False)
    for _ in range(4):
        graphs.run(SHAPES[0], "draw")
    graphs.run(SHAPES[0], "cut")
    assert log == ["body", "begin", "body", "end", "replay", "replay", "replay", "body"]
    assert len(graphs) == 1 and not graphs.takes(SHAPES[0], "draw")


def test_nothing_is_captured_eagerly_paused_or_beyond_the_most(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = StepGraphs(lambda shape, form: None, eager=True)
    for _ in range(3):
        graphs.run(SHAPES[0], "draw")
    graphs = StepGraphs(lambda shape, form: None, eager=False)
    with graphs.paused():
        for _ in range(3):
            graphs.run(SHAPES[0], "draw")
    monkeypatch.setattr(gpu_graphs, "MAX_GRAPHS", 1)
    graphs.capture(SHAPES[1], "draw")
    del log[:]
    for _ in range(3):
        graphs.run(SHAPES[0], "draw")
    assert log == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("broken")])
def test_a_failing_capture(log: list[str], error: Exception) -> None:
    """Without memory steps run on without a graph; another error is itself, not CUDA's."""

    def body(shape: object, form: str) -> None:
        if log and log[-1] == "begin":
            FakeGraph.failed = True
            raise error
        log.append("body")

    graphs = StepGraphs(body, eager=False)
    graphs.run(SHAPES[2], "draw")
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="broken"):
            graphs.run(SHAPES[2], "draw")
        return
    for _ in range(3):
        graphs.run(SHAPES[2], "draw")
    assert log == ["body", "begin", "end", "body", "body", "body"]


def test_the_nearest_graph_holds_the_step_and_little_more(log: list[str]) -> None:
    sizes = StepSizes(64)
    graphs = StepGraphs(lambda shape, form: None, eager=False)
    captured = [
        sizes.mixed(decodes, 1, tokens, decodes + 1)
        for decodes in (0, 32)
        for tokens in (256, 1024)
    ]
    for shape in captured:
        graphs.capture(shape, "draw")
    wanted = sizes.mixed(20, 2, 300, 22)
    assert graphs.nearest(wanted, "draw", 2000) == sizes.mixed(32, 1, 1024, 33)
    assert graphs.nearest(sizes.mixed(0, 3, 250, 3), "draw", 2000) == sizes.mixed(0, 1, 256, 1)
    assert graphs.nearest(wanted, "draw", 600) is None, "too much padding"
    assert graphs.nearest(wanted, "cut", 2000) is None
    assert graphs.nearest(sizes.mixed(20, 40, 300, 22), "draw", 2000) is None, "too many prompts"
    assert graphs.nearest(captured[1], "draw", 0) == captured[1]
