"""The tokenizer process over real sockets: when it is ready, what it answers, how it ends."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from zlm.ipc.sockets import Inbox, address
from zlm.messages import (
    FINISH_EOS,
    ChatPrompt,
    EngineReady,
    Fatal,
    Generate,
    Launch,
    Progress,
    Ready,
    StepOutput,
    Submit,
    ToEngine,
    ToFrontend,
    Tokenize,
    Tokens,
    ToSupervisor,
)
from zlm.process.launch import ProcessGroup
from zlm.process.runtime import RuntimeDirectory
from zlm.sampling_params import SamplingParams

TIMEOUT_MS = 60_000


class Tree:
    """A tokenizer process, and the inboxes of its peers."""

    def __init__(self, runtime: Path) -> None:
        self.context = zmq.Context()
        self.group = ProcessGroup(runtime, self.context)
        accepts = {"supervisor": ToSupervisor, "engine": ToEngine, "frontend": ToFrontend}
        self.inboxes = {
            role: Inbox(self.context, address(runtime, role), union)
            for role, union in accepts.items()
        }
        self.waiting: dict[str, list[Any]] = {role: [] for role in accepts}
        self.group.spawn("tokenizer", 0)

    def send(self, message: Any) -> None:
        self.group.send("tokenizer", 0, message)

    def next(self, role: str) -> Any:
        """Return the next message to *role*, waiting for it."""
        if not self.waiting[role]:
            self.waiting[role] = self.inboxes[role].receive(TIMEOUT_MS)
            assert self.waiting[role], f"nothing came to the {role}"
        return self.waiting[role].pop(0)

    def close(self) -> None:
        self.group.kill()
        for inbox in self.inboxes.values():
            inbox.close()
        self.context.term()


@pytest.fixture
def tree() -> Iterator[Tree]:
    with RuntimeDirectory() as runtime:
        tree = Tree(runtime.path)
        yield tree
        tree.close()


def test_a_request_goes_round(tree: Tree, make_engine: Callable[..., Any]) -> None:
    resolved = make_engine().resolved
    chat = ChatPrompt([{"role": "user", "content": "Hi"}])
    # Whatever comes before Launch waits; the engine may be ready before this process is.
    tree.send(EngineReady(num_blocks=[8], max_sequence_tokens=100))
    tree.send(Tokenize(7, prompt="Hi"))
    tree.send(Launch(resolved))
    assert isinstance(tree.next("supervisor"), Progress)
    ready = tree.next("supervisor")
    assert (ready.role, ready.index) == ("tokenizer", 0)
    assert isinstance(ready, Ready)
    assert isinstance(tree.next("frontend"), Tokens)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    tree.send(Generate(8, arrival=0.0, prompts=[], params=params, chat=chat))
    submit = tree.next("engine")
    assert isinstance(submit, Submit)
    column = array("q", [submit.seq_id]).tobytes()
    tree.send(StepOutput(column, array("i", [2]).tobytes(), bytes([FINISH_EOS])))
    (delta,) = tree.next("frontend").items
    assert (delta.request_id, delta.finish_reason) == (8, "stop")
    (death,) = tree.group.stop(TIMEOUT_MS / 1000)
    assert death.status == 0


def test_a_tokenizer_that_cannot_be_loaded_is_told(
    tree: Tree, make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    resolved = make_engine().resolved
    (tmp_path / "tokenizer.json").unlink()
    tree.send(Launch(resolved))
    assert isinstance(tree.next("supervisor"), Progress)
    fatal = tree.next("supervisor")
    assert isinstance(fatal, Fatal)
    assert "no tokenizer.json" in fatal.text
