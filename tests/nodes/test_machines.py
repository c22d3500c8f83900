"""One engine on two machines: it answers as one process does, and loses none of its requests."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_load import start_load
from machines import FLAGS, IPV6_ADDRESSES, Machines, Pair
from running_server import Server, eventually_true

PROMPTS: list[tuple[Any, dict[str, Any]]] = [
    ("The quick brown fox", {"max_tokens": 24, "ignore_eos": True}),
    ("What is the capital of France? " * 8, {"max_tokens": 24, "logprobs": 2}),
    ("once upon a time", {"temperature": 0.9, "seed": 3, "n": 3}),
    ("1, 2, 3, 4,", {"temperature": 0.7, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5}),
    ("Say:", {"structured_outputs": {"regex": "[a-z]{4} [0-9]{3}"}, "temperature": 1, "seed": 1}),
]
RECOVERY_SECONDS = 60.0

Start = Callable[..., Pair]


def answers(server: Server) -> list[Any]:
    """Return the token ids of the samples of PROMPTS, which are asked for at once."""
    found = server.together([(p, {**fields, "return_token_ids": True}) for p, fields in PROMPTS])
    assert all(answer.status == 200 for answer in found), [answer.body for answer in found]
    return [[choice["token_ids"] for choice in answer.json["choices"]] for answer in found]


@pytest.fixture(scope="module")
def alone(machines: Machines, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one worker answers."""
    with Server(model, tmp_path_factory.mktemp("alone") / "log", FLAGS) as server:
        return answers(server)


@pytest.fixture(scope="module")
def pair(start: Start) -> Pair:
    """Two ranks, one on each machine."""
    return start("-tp", "2")


def recovered(pair: Pair, alone: list[Any]) -> bool:
    """Whether the pair comes back and answers as before."""
    is_back = eventually_true(lambda: pair.head.health() == 200, RECOVERY_SECONDS)
    assert is_back, pair.head.log.read_text()[-4000:] + pair.node.log.read_text()[-2000:]
    return answers(pair.head) == alone


def breaks(pair: Pair, fault: Callable[[], None]) -> None:
    """Have *fault* under load; each open request is answered once, with its error or its end."""
    opened = start_load(pair.head)
    fault()
    outcomes = {request.outcome() for request in opened}
    assert outcomes == {"error"}


def test_ranks_answer_as_one_process(pair: Pair, alone: list[Any]) -> None:
    pair.head.wait_ready()
    assert len(pair.machines.workers(0)) == len(pair.machines.workers(1)) == 1
    assert pair.machines.open_ports(0) == pair.machines.open_ports(1) == []
    assert answers(pair.head) == alone


def test_a_second_node_of_one_number_is_refused(pair: Pair) -> None:
    pair.head.wait_ready()
    assert pair.add_node().end() == (
        1, "zlm: node 1 is there already: give another --node-rank"
    )  # fmt: skip
    pair.head.assert_good()


def test_a_wrong_key_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLM_CLUSTER_KEY", "the secret of somebody else")
    status, last = pair.add_node().end()
    assert status == 1 and "refuses this node: the secret (--cluster-key or $ZLM_CL" in last
    pair.head.wait_ready()
    pair.head.assert_good()


def test_the_other_machines_worker_is_killed(pair: Pair, alone: list[Any]) -> None:
    before = pair.machines.workers(0) + pair.machines.workers(1)
    breaks(pair, lambda: os.kill(pair.machines.workers(1)[0], signal.SIGKILL))
    assert recovered(pair, alone)
    after = pair.machines.workers(0) + pair.machines.workers(1)
    assert len(after) == 2 and not set(before) & set(after)
    assert "worker 1 on node 1 died: killed by signal 9 (SIGKILL)" in pair.head.log.read_text()


def test_the_link_is_cut(pair: Pair, alone: list[Any]) -> None:
    breaks(pair, pair.machines.cut)
    try:
        assert eventually_true(lambda: not pair.machines.workers(1), 10), "they wait for nobody"
        assert pair.head.health() == 503
    finally:
        pair.machines.mend()
    assert recovered(pair, alone)


def test_the_other_machines_supervisor_is_killed(pair: Pair, alone: list[Any]) -> None:
    breaks(pair, pair.node.process.kill)
    assert eventually_true(lambda: not pair.machines.pids(1), 10), "no process outlives it"
    assert pair.head.complete("nobody").status == 503
    pair.node = pair.add_node()
    assert recovered(pair, alone)


def test_the_head_is_killed(pair: Pair) -> None:
    pair.head.process.kill()
    assert eventually_true(lambda: not pair.machines.workers(1), 10), "they wait for nobody"
    assert pair.node.process.poll() is None, "it waits for the next head"
    pair.node.process.send_signal(signal.SIGTERM)
    assert pair.node.end()[0] == 0
    assert not pair.machines.pids(1)


def test_stages_answer_as_one_process_and_leave_together(start: Start, alone: list[Any]) -> None:
    pair = start("-pp", "2")
    pair.head.wait_ready()
    assert answers(pair.head) == alone
    breaks(pair, lambda: pair.node.process.send_signal(signal.SIGTERM))
    assert pair.node.end()[0] == 0
    left = "worker 1 on node 1 died: its machine leaves: it was told to; restarting it now"
    assert left in pair.head.log.read_text()
    pair.node = pair.add_node()
    assert recovered(pair, alone)
    pair.head.process.send_signal(signal.SIGTERM)
    assert pair.node.end()[0] == 0
    assert pair.head.process.wait(10) == 0
    assert not pair.machines.pids(1) and not pair.machines.workers(0)


def test_over_ipv6_and_a_node_that_never_returns(
    machines: Machines, start: Start, alone: list[Any]
) -> None:
    machines.add_ipv6()
    limits = ["--startup-timeout", "10", "--max-restarts", "1"]
    pair = start("-tp", "2", "--master-addr", IPV6_ADDRESSES[0], *limits)
    pair.head.wait_ready()
    assert answers(pair.head) == alone
    pair.node.process.kill()
    assert pair.head.process.wait(60) == 1
    last = (
        r"zlm: worker 1 on node 1 has made no progress for \d+ s \(not there: node 1\); it has .*"
    )
    assert re.fullmatch(last, pair.head.log.read_text().splitlines()[-1])


def test_another_checkpoint_on_the_other_machine(start: Start, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "model")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    pair = start("-tp", "2", node_model=other)
    words = "node 1 and node 0 must have the same checkpoint: it is "
    assert pair.node.end()[0] == pair.head.process.wait(30) == 1
    for log in (pair.node.log, pair.head.log):
        assert words in log.read_text().splitlines()[-1]


@pytest.mark.slow
def test_a_worker_that_hangs_has_all_machines_write_stacks(start: Start, alone: list[Any]) -> None:
    pair = start("-tp", "2", "--hang-timeout", "3")
    pair.head.wait_ready()
    logs = pair.head.log, pair.node.log
    for machine in (1, 0):  # the first while no other waits for it, and seems to hang as well
        before = [len(log.read_text()) for log in logs]
        (stopped,) = pair.machines.workers(machine)
        os.kill(stopped, signal.SIGSTOP)
        assert eventually_true(lambda: pair.head.health() == 503, 20)
        assert recovered(pair, alone)
        told = [log.read_text()[start:] for log, start in zip(logs, before, strict=True)]
        assert re.search(r"worker \d has .*: it hangs", told[0])
        for worker, text in enumerate(told):
            stacks = rf"stacks of worker {worker} \(process \d+\):\n(.*\n)*?.*process\.py"
            assert re.search(stacks, text), text
    pair.stop()
