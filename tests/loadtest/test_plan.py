"""Lengths, arrivals and prompts."""

import json
import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zlm.errors import ConfigError
from zlm.loadtest.plan import Lengths, Pace, Shape, Turn
from zlm.loadtest.prompts import Scale, Source, read

FIXED = Lengths("fixed", 4)


def drawn(text: str, number: int = 4000) -> list[int]:
    rng = random.Random(1)
    return [Lengths.parse(text).draw(rng) for _ in range(number)]


def test_lengths() -> None:
    assert set(drawn("12", 10)) == {12}
    assert set(drawn("uniform:3:5")) == set(drawn("3-5")) == {3, 4, 5}
    normal = drawn("normal:100:10")
    assert statistics.fmean(normal) == pytest.approx(100, abs=1)
    assert statistics.stdev(normal) == pytest.approx(10, abs=0.5)
    assert min(drawn("normal:2:50")) == 1, "never less than one token"
    assert str(Lengths.parse("3-5")) == "uniform:3:5" and str(FIXED) == "4"


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "x", "uniform:5", "uniform:5:3", "normal:5:-1", "5:5", "nan", "normal:inf:1"],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be N"):
        Lengths.parse(text)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float, variation: float) -> None:
    """The coefficient of variation of gamma intervals is 1 / sqrt(burstiness)."""
    times = Pace(request_rate=20, burstiness=burstiness).arrivals(20_000, random.Random(3))
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_arrivals_may_be_even() -> None:
    pace = Pace(request_rate=4, burstiness=float("inf"))
    assert pace.arrivals(4, random.Random()) == [0.0, 0.25, 0.5, 0.75]


def test_random_ids_have_exact_lengths_and_differ() -> None:
    source = Source(input=Lengths("fixed", 50), output=FIXED, as_ids=True, vocab=300)
    talks = source.conversations(20, random.Random(1))
    prompts = [tuple(talk[0].prompt) for talk in talks]
    assert len(set(prompts)) == 20
    assert all(len(prompt) == 50 and 100 <= min(prompt) <= max(prompt) < 300 for prompt in prompts)
    assert talks == source.conversations(20, random.Random(1)), "a seed gives the same prompts"


def test_shared_prefixes() -> None:
    source = Source(input=FIXED, output=FIXED, as_ids=True, prefix_tokens=30, num_prefixes=2)
    prompts = [talk[0].prompt for talk in source.conversations(40, random.Random(1))]
    assert {len(prompt) for prompt in prompts} == {34}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 40


def test_words_come_to_the_tokens_that_are_wanted() -> None:
    scale = Scale.between((20, 60), (20 * 2 + 7, 60 * 2 + 7))  # two tokens a word, seven around
    assert (scale.per_unit, scale.offset) == (2.0, 7.0)
    source = Source(input=Lengths("fixed", 107), output=FIXED, words=scale)
    (turn,) = source.conversations(1, random.Random(1))[0]
    assert len(turn.prompt.split()) == 50 and turn.input_tokens == 107
    assert Scale.between((20, 60), (5, 5)) == Scale(), "a server that counts nothing"


def test_bodies() -> None:
    turn, history = Turn("more", 1, 9), [{"role": "user", "content": "a"}]
    plain = Shape(model="m", fields={"top_k": 5, "temperature": 1}).body([], Turn([1, 2], 2, 9))
    assert plain["prompt"] == [1, 2] and plain["ignore_eos"] and plain["stream_options"]
    assert (plain["top_k"], plain["temperature"], plain["max_tokens"]) == (5, 1, 9)
    chat = Shape(model="m", endpoint="chat", is_streamed=False, ignore_eos=False).body(
        history, turn
    )
    assert chat["messages"] == [*history, {"role": "user", "content": "more"}]
    assert not {"stream", "stream_options", "ignore_eos", "prompt"} & chat.keys()
    assert Shape(model="m").body(history, turn)["prompt"] == "a\nmore"


def sharegpt(*said: str) -> dict[str, Any]:
    who = ["human", "gpt"]
    return {"conversations": [{"from": who[n % 2], "value": text} for n, text in enumerate(said)]}


def test_a_sharegpt_file(tmp_path: Path) -> None:
    rows = [sharegpt("q" * 40, "a" * 80, "r" * 8, "b" * 4), sharegpt("only"), sharegpt()]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(rows))
    talks = read(path, Scale(0.25))
    assert talks == [(Turn("q" * 40, 10, 20), Turn("r" * 8, 2, 1))]
    source = Source(input=FIXED, output=None, samples=talks)
    assert [len(talk) for talk in source.conversations(3, random.Random(1))] == [1, 1, 1]
    two = Source(input=FIXED, output=Lengths("fixed", 7), turns=Lengths("fixed", 2), samples=talks)
    assert [turn.output_tokens for turn in two.conversations(1, random.Random(1))[0]] == [7, 7]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert read(path, Scale(0.25)) == talks, "a row a line"


def test_a_file_of_requests(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "abcd", "output_tokens": 3},
        {"prompt": [1, 2]},
        {"messages": messages, "max_tokens": 5},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    turns = [talk[0] for talk in read(path, Scale(0.5))]
    assert turns == [Turn("abcd", 2, 3), Turn([1, 2], 2, 128), Turn(messages, 2, 5)]


GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no request"),
        ("[]", "no request"),
        (f"{GOOD}\n\n{{", "line 3 is no JSON: Expecting property name"),
        (f"[{GOOD},\n}}]", "is no JSON: Expecting value: line 2 column 1"),
        (f"[{GOOD}, 1]", "entry 2: must be an object, got 1"),
        (f'{GOOD}\n"text"', "line 2: must be an object, got 'text'"),
        ('{"x": 1}', "line 1: must have prompt, messages or conversations"),
        (
            '{"prompt": ""}',
            "line 1: must have prompt, messages or conversations, not empty, got ''",
        ),
        ('{"prompt": 3}', "line 1: must have prompt, .* got 3"),
        ('{"prompt": [1, "a"]}', "line 1: must have a prompt of text or token ids"),
        ('{"messages": [{"role": "user"}]}', "line 1: must have .* messages with content"),
        ('{"prompt": "a", "max_tokens": "few"}', "line 1: output_tokens must be at least 1, got"),
        ('{"conversations": [{"a": 1}, {}]}', 'line 1: conversations must be a list of {"from"'),
        ('{"conversations": [{"from": "gpt", "value": 5}]}', "line 1: conversations must be"),
    ],
)
def test_a_file_of_neither_form_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"--dataset {path}:? {message}"):
        read(path, Scale())


@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, form: str) -> None:
    path = tmp_path / "x"
    path.write_text("\ufeff" + form.replace("{}", GOOD), encoding="utf-8")
    assert read(path, Scale()) == [(Turn("a", 1, 128),)]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "x", Scale())
