"""Steps whose sampling waits for the masks of grammars: the CPU runner and the worker's loop."""

import threading
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import zmq
from worker_steps import VOCAB, Harness, execute, ids, join, masks_of, tokens_of

from zlm.ipc.sockets import Inbox, Outbox, address
from zlm.messages import (
    ROW_ALL_MASKED,
    ROW_NAN,
    ROW_OK,
    Masks,
    StepResult,
    Stop,
    ToEngine,
    ToWorker,
)
from zlm.worker.process import work

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]


def step_of(harness: Harness, rows, joins=()):
    """Return the message of a step with the blocks that it needs, not run."""
    sent = []
    run = harness.runner.execute
    harness.runner.execute = sent.append
    try:
        harness.step(rows, joins)
    finally:
        harness.runner.execute = run
    return sent[0]


def test_a_masked_step_samples_when_its_masks_are_there() -> None:
    harness = Harness()
    message = step_of(
        harness, [(0, 0, 13, 1), (1, 0, 12, 1)], [join(0, PROMPT), join(1, PROMPT[1:])]
    )
    free = tokens_of(Harness().runner.execute(message))
    runner = harness.runner
    runner.launch(msgspec.structs.replace(message, masked=True))
    assert runner.awaits_masks and not runner.in_flight
    allowed = [i for i in range(VOCAB) if i != free[1]]
    runner.mask(masks_of(message.step, {1: allowed}))
    assert runner.in_flight and not runner.awaits_masks
    masked = tokens_of(runner.collect())
    assert masked[0] == free[0] and masked[1] != free[1]


def test_masks_that_mask_nothing_change_nothing() -> None:
    harness, other = Harness(), Harness()
    message = step_of(harness, [(0, 0, 13, 1)], [join(0, PROMPT, temperature=1.0, seed=5)])
    expected = other.runner.execute(message)
    got = harness.runner.execute(message, Masks(message.step))
    assert got.token_ids == expected.token_ids and got.status == expected.status


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drawn_tokens_stay_within_the_mask(temperature: float) -> None:
    harness = Harness()
    allowed = [1, 33, 64, 96]
    for seed in range(20):
        message = step_of(
            harness, [(0, 0, 13, 1)], [join(0, PROMPT, temperature=temperature, seed=seed)]
        )
        [token] = tokens_of(harness.runner.execute(message, masks_of(message.step, {0: allowed})))
        assert token in allowed


def test_an_empty_mask_and_a_nan_are_told_apart_and_spare_neighbours() -> None:
    harness = Harness()
    harness.model.poison = {PROMPT[-1]}
    rows = [(0, 0, 13, 1), (1, 0, 12, 1), (2, 0, 11, 1)]
    joins = [join(0, PROMPT), join(1, PROMPT[:12]), join(2, PROMPT[:11])]
    message = step_of(harness, rows, joins)
    result = harness.runner.execute(message, masks_of(message.step, {0: [5], 1: [], 2: [7]}))
    assert list(result.status) == [ROW_NAN, ROW_ALL_MASKED, ROW_OK]
    assert tokens_of(result)[2] == 7


def test_allowed_ids_and_masks_both_hold() -> None:
    harness = Harness()
    message = step_of(harness, [(0, 0, 13, 1)], [join(0, PROMPT, allowed_ids=ids([2, 4, 6]))])
    result = harness.runner.execute(message, masks_of(message.step, {0: [5, 6, 7]}))
    assert tokens_of(result) == [6]


def test_the_loop_holds_steps_back_until_the_masks_come(tmp_path: Path) -> None:
    """A step that was sent ahead reads the token that the masked step before it samples."""
    harness, context = Harness(), zmq.Context()
    first = step_of(harness, [(0, 0, 13, 1)], [join(0, PROMPT)])
    ahead = step_of(harness, [(0, 13, 1, 1)])
    alone = Harness()
    wanted = tokens_of(alone.runner.execute(first, masks_of(first.step, {0: [9]})))
    wanted += tokens_of(alone.runner.execute(ahead))
    inbox = Inbox(context, address(tmp_path, "worker"), ToWorker)
    results = Inbox(context, address(tmp_path, "engine"), ToEngine)
    engine, sender = Outbox(context, address(tmp_path, "engine")), Outbox(context, inbox._at)
    thread = threading.Thread(
        target=work, args=(inbox, engine, harness.runner, Mock(), lambda _: None)
    )
    thread.start()
    try:
        sender.send(msgspec.structs.replace(first, masked=True))
        sender.send(ahead)
        assert results.receive(200) == []
        sender.send(masks_of(first.step, {0: [9]}))
        got: list[StepResult] = []
        while len(got) < 2:
            news = results.receive(20_000)
            assert news, "the worker is silent"
            got += news
        assert [token for each in got for token in tokens_of(each)] == wanted
        assert wanted[0] == 9 and [each.step for each in got] == [first.step, ahead.step]
    finally:
        sender.send(Stop())
        thread.join(20)
        for socket in (inbox, results):
            socket.close()
        context.destroy(linger=0)
    assert not thread.is_alive()


def test_words_are_bits_of_ids() -> None:
    masks = masks_of(1, {0: [0, 31, 32, 96]})
    words = np.frombuffer(masks.words, np.uint32)
    assert words.tolist() == [1 | 1 << 31, 1, 0, 1]
    assert execute(1, []).masked is False
