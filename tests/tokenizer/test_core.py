"""Requests from Generate to their end, with a fake engine.

CASES 1, 2, 9, 10, 13, 15, 37, 55, 56, 59, 62, 71.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from zlm.messages import (
    FINISH_ABORT,
    FINISH_EOS,
    FINISH_LENGTH,
    FINISH_STOP_ID,
    RUNNING,
    Cancel,
    ChatPrompt,
    Delta,
    Deltas,
    Detokenize,
    DetokenizedText,
    Failed,
    SequenceError,
    StepOutput,
    Tokenize,
    Tokens,
)
from zlm.tokenizer.choice import Choice

USER = [{"role": "user", "content": "Hi"}]
FACE = "ðŁĺĢ"  # the four byte tokens of 😀


def ids(engine: Any, text: str) -> list[int]:
    return engine.core.vocabulary.encode(text)


def byte_ids(engine: Any, spelling: str) -> list[int]:
    return [engine.core.vocabulary.tokenizer.token_to_id(c) for c in spelling]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_a_stream_and_its_end_by_eos(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("The fox", stream=True)
    tokens = ids(engine, " jumps over")
    engine.step((submit.seq_id, tokens[0], RUNNING), cached=[(0, 16)])
    deltas = engine.deltas() + engine.run(submit.seq_id, [*tokens[1:], 2], finish=FINISH_EOS)
    assert text_of(deltas) == " jumps over"
    assert [d.finish_reason for d in deltas][-1] == "stop"
    assert all(d.finish_reason is None for d in deltas[:-1])
    assert deltas[-1].stop_reason is None
    assert deltas[-1].num_output_tokens == len(tokens) + 1
    assert deltas[-1].num_prompt_tokens == len(ids(engine, "The fox"))
    assert deltas[-1].num_cached_tokens == 16
    assert all(d.text or d.finish_reason for d in deltas)
    assert engine.core.open_requests == 0
    assert engine.aborts == []


def test_a_plain_answer_is_one_delta_a_choice(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", n=2)
    tokens = ids(engine, "xyz")
    deltas = engine.run(submit.seq_id + 1, tokens) + engine.run(submit.seq_id, tokens)
    assert [(d.index, d.text, d.finish_reason) for d in deltas] == [
        (1, "xyz", "length"),
        (0, "xyz", "length"),
    ]


def test_choices_are_ordered_by_prompt_then_sample(make_engine: Callable) -> None:
    engine = make_engine()
    first, second = engine.generate(["a", "bb"], n=2)
    (token,) = ids(engine, "x")
    rows = [(s.seq_id + i, token, FINISH_LENGTH) for s in (second, first) for i in (1, 0)]
    (answer,) = engine.step(*rows)
    assert [d.index for d in answer.items] == [3, 2, 1, 0]


def test_one_message_a_step_and_front_end(make_engine: Callable) -> None:
    engine = make_engine()
    requests = [1, 2, (1 << 48) | 1]
    seqs = [engine.generate("a", request_id=r, stream=True)[0].seq_id for r in requests]
    (token,) = ids(engine, "x")
    answers = engine.step(*((seq, token, RUNNING) for seq in seqs))
    assert [[d.request_id for d in a.items] for a in answers] == [[1, 2], [(1 << 48) | 1]]


# ---------------------------------------------------------------------- text


@pytest.mark.parametrize("stream", [True, False])
def test_a_character_cut_by_the_limit_ends_alike(make_engine: Callable, stream: bool) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", stream=stream)
    deltas = engine.run(submit.seq_id, ids(engine, "x") + byte_ids(engine, FACE[:3]))
    assert text_of(deltas) == "x�"
    assert deltas[-1].finish_reason == "length"


def test_no_delta_while_bytes_are_held(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", stream=True)
    deltas = engine.run(submit.seq_id, byte_ids(engine, FACE) + ids(engine, "x"))
    assert [d.text for d in deltas] == ["😀", "x"]


def test_completions_keep_a_leading_space_and_chats_do_not(make_engine: Callable) -> None:
    engine = make_engine("sentencepiece", chat_template="{{ messages[0].content }}")
    paris = [engine.core.vocabulary.tokenizer.token_to_id("▁Paris")]
    (submit,) = engine.generate("the")
    assert text_of(engine.run(submit.seq_id, paris)) == " Paris"
    (submit,) = engine.generate(chat=USER)
    assert text_of(engine.run(submit.seq_id, paris)) == "Paris"


def test_special_tokens_in_the_text_when_asked(make_engine: Callable) -> None:
    engine = make_engine()
    for skip, text in ((True, "ab"), (False, "a<|im_start|>b")):
        (submit,) = engine.generate("x", skip_special_tokens=skip)
        tokens = [*ids(engine, "a"), 1, *ids(engine, "b")]
        assert text_of(engine.run(submit.seq_id, tokens)) == text


def test_without_detokenization_there_are_only_ids(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", detokenize=False, return_token_ids=True)
    (delta,) = engine.run(submit.seq_id, [5, 6])
    assert (delta.text, delta.token_ids, delta.prompt_token_ids) == ("", [5, 6], ids(engine, "a"))


# ---------------------------------------------------------------------- stops


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_aborts_and_nothing_of_it_leaks(make_engine: Callable, include: bool) -> None:
    engine = make_engine()
    (submit,) = engine.generate(
        "a", stream=True, stop=["DEFGHIJ"], include_stop_str_in_output=include
    )
    deltas: list[Delta] = []
    for character in "ABCDEFGHIJ":
        for answer in engine.step((submit.seq_id, *ids(engine, character), RUNNING)):
            deltas += answer.items
    assert text_of(deltas) == ("ABCDEFGHIJ" if include else "ABC")
    assert [d.text for d in deltas[:3]] == ["A", "B", "C"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "DEFGHIJ")
    assert engine.aborts == [submit.seq_id]
    # What the engine had under way, and its terminal row, are dropped.
    assert engine.step((submit.seq_id, 42, RUNNING)) == []
    assert engine.step((submit.seq_id, -1, FINISH_ABORT)) == []
    assert engine.core.open_requests == 0


def test_a_stop_string_in_the_last_token_wins_over_length(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", stop=["\n\n"])
    (delta,) = engine.run(submit.seq_id, [*ids(engine, "."), *ids(engine, "\n\n")])
    assert (delta.text, delta.finish_reason, delta.stop_reason) == (".", "stop", "\n\n")
    assert engine.aborts == []


def test_held_text_goes_out_at_the_end(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", stream=True, stop=["XYZ"])
    assert text_of(engine.run(submit.seq_id, ids(engine, "aX") + ids(engine, "Y"))) == "aXY"


def test_min_tokens_holds_off_stop_strings(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", stop=["\n"], min_tokens=6, max_tokens=6)
    newline = ids(engine, "\n")
    (delta,) = engine.run(submit.seq_id, newline * 6)
    assert (delta.text, delta.finish_reason) == ("\n" * 6, "length")
    (submit,) = engine.generate("a", stop=["\n"], min_tokens=2)
    (delta,) = engine.run(submit.seq_id, newline * 2 + ids(engine, "x") + newline)
    assert (delta.text, delta.finish_reason) == ("\n\nx", "stop")


def test_a_stop_id_is_named_and_cuts_nothing_else(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", stop_token_ids=[1])
    (delta,) = engine.run(submit.seq_id, [*ids(engine, "word"), 1], finish=FINISH_STOP_ID)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("word", "stop", 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ended_the_text_is_shown_when_asked(
    make_engine: Callable, stream: bool, skip: bool
) -> None:
    """It is text like any other, so special ones show only if none are skipped."""
    engine = make_engine()
    (end,) = ids(engine, "s")
    for token, shown, finish, reason in (
        (end, "s", FINISH_STOP_ID, end),
        (1, "" if skip else "<|im_start|>", FINISH_STOP_ID, 1),
        (2, "" if skip else "<|im_end|>", FINISH_EOS, None),
    ):
        wanted = {"skip_special_tokens": skip, "include_stop_str_in_output": True}
        (submit,) = engine.generate("a", stream=stream, stop_token_ids=[end, 1], **wanted)
        deltas = engine.run(submit.seq_id, [*ids(engine, "word"), token], finish=finish)
        assert text_of(deltas) == "word" + shown
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", reason)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.lists(st.integers(0, 425), min_size=1, max_size=20),
    stops=st.lists(st.sampled_from(["a", "ab", "é", "\n", "�", "th", "e f"]), max_size=3),
    skip=st.booleans(),
    logprobs=st.booleans(),
    with_ids=st.booleans(),
)
def test_streamed_and_plain_answers_are_equal(
    make_engine: Callable,
    columns: Callable,
    tokens: list[int],
    stops: list[str],
    skip: bool,
    logprobs: bool,
    with_ids: bool,
) -> None:
    engine = make_engine.shared  # type: ignore[attr-defined]
    options: dict[str, Any] = {"stop": stops or None, "skip_special_tokens": skip}
    options |= {"max_tokens": 64, "logprobs": 0 if logprobs else None, "return_token_ids": with_ids}
    (streamed,) = engine.generate("a", request_id=1, stream=True, **options)
    (plain,) = engine.generate("a", request_id=2, **options)
    engine.answers.clear()
    for k, token in enumerate(tokens):
        finish = FINISH_LENGTH if k == len(tokens) - 1 else RUNNING
        rows = [(s.seq_id, token, finish) for s in (streamed, plain)]
        engine.step(*rows, logprobs=columns([(r, [(token, -1.0)]) for r in (0, 1)]))
    many = [d for d in engine.deltas() if d.request_id == 1]
    (one,) = (d for d in engine.deltas() if d.request_id == 2)
    assert text_of(many) == one.text
    assert [t for d in many for t in d.token_ids or ()] == (one.token_ids or [])
    assert (many[-1].finish_reason, many[-1].stop_reason) == (one.finish_reason, one.stop_reason)
    assert many[-1].num_output_tokens == one.num_output_tokens
    assert [d.finish_reason for d in many[:-1]] == [None] * (len(many) - 1)
    assert all(d.text or d.finish_reason or d.logprobs for d in many)
    if logprobs:
        assert [e for d in many for e in d.logprobs or ()] == one.logprobs
        if one.stop_reason is None:
            assert [e.token_id for e in one.logprobs or ()] == tokens
    if one.stop_reason is None:
        assert one.text == engine.core.vocabulary.decode(tokens, skip_special_tokens=skip)
    assert engine.core.open_requests == 0


@pytest.fixture(autouse=True)
def shared_engine(make_engine: Callable) -> None:
    """An engine that a property test's examples share."""
    make_engine.shared = make_engine()  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- log-probabilities


def test_entries_go_with_the_text_they_belong_to(make_engine: Callable, columns: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", stream=True, logprobs=1)
    tokens = byte_ids(engine, FACE) + ids(engine, "x")
    deltas: list[Delta] = []
    for token in tokens:
        entries = columns([(0, [(token, -0.5), (2, -1.5)])])
        for answer in engine.step((submit.seq_id, token, RUNNING), logprobs=entries):
            deltas += answer.items
    assert [d.text for d in deltas] == ["😀", "x"]
    assert [len(d.logprobs or ()) for d in deltas] == [4, 1]
    entry = (deltas[0].logprobs or [])[0]
    assert (entry.token, entry.token_bytes, entry.logprob, entry.rank) == ("�", b"\xf0", -0.5, 1)
    assert entry.top == [(2, "<|im_end|>", b"<|im_end|>", -1.5)]  # the end token by its name


def test_the_end_token_has_an_entry_and_no_text(make_engine: Callable, columns: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", logprobs=0)
    row = (submit.seq_id, 2, FINISH_EOS)
    (answer,) = engine.step(row, logprobs=columns([(0, [(2, -0.25)])]))
    (delta,) = answer.items
    assert delta.text == ""
    assert [(e.token, e.top) for e in delta.logprobs or ()] == [("<|im_end|>", [])]
    assert delta.num_output_tokens == 1


def test_entries_after_a_stop_string_are_dropped(make_engine: Callable, columns: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", logprobs=0, stop=["XY"])
    for token in ids(engine, "q") + ids(engine, "X") + ids(engine, "Y"):
        rows = (submit.seq_id, token, RUNNING)
        engine.step(rows, logprobs=columns([(0, [(token, -1.0)])]))
    (delta,) = engine.deltas()
    assert (delta.text, [e.token for e in delta.logprobs or ()]) == ("q", ["q"])


def test_impossible_values_are_finite(make_engine: Callable, columns: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", logprobs=2)
    values = [(5, float("-inf")), (6, float("nan")), (7, 0.0)]
    (answer,) = engine.step((submit.seq_id, 5, FINISH_LENGTH), logprobs=columns([(0, values)]))
    (entry,) = answer.items[0].logprobs or ()
    assert entry.logprob == -9999.0
    assert [value for *_, value in entry.top] == [-9999.0, 0.0]


def prompt_columns(columns: Callable, tokens: list[int], row: int = 0) -> Any:
    return columns([(row, [(t, -float(t)), (9, -0.1), (8, -0.2)]) for t in tokens])


def test_echo_with_logprobs(make_engine: Callable, columns: Callable) -> None:
    engine = make_engine()
    prompt = ids(engine, "The fox")
    (submit,) = engine.generate("The fox", echo=True, logprobs=1, max_tokens=1)
    assert submit.sampling.prompt_logprobs == 1
    # The prompt's positions come in two chunks, the first without a token.
    row = (submit.seq_id, -1, RUNNING)
    assert engine.step(row, prompt_logprobs=prompt_columns(columns, prompt[1:3])) == []
    (token,) = ids(engine, "x")
    (answer,) = engine.step(
        (submit.seq_id, token, FINISH_LENGTH),
        logprobs=columns([(0, [(token, -1.0), (9, -2.0)])]),
        prompt_logprobs=prompt_columns(columns, prompt[3:]),
    )
    (delta,) = answer.items
    assert delta.text == "The foxx"
    assert delta.logprobs is not None
    assert [e.token_id for e in delta.logprobs] == [*prompt, token]
    assert delta.logprobs[0].logprob is None
    assert delta.logprobs[0].token == engine.core.vocabulary.decode(
        prompt[:1], skip_special_tokens=True
    )
    assert "".join(e.token for e in delta.logprobs) == delta.text
    assert all(len(e.top) == 1 for e in delta.logprobs[1:])


@pytest.mark.parametrize(
    ("kind", "text"), [("byte_level", "é <|im_start|>😀x"), ("sentencepiece", "the é😀 x")]
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_places_in_the_returned_text(
    make_engine: Callable, columns: Callable, kind: str, text: str, as_ids: bool
) -> None:
    """CASE 60: a part of a character is where that stands; what is not shown takes no room."""
    engine = make_engine(kind)
    vocabulary = engine.core.vocabulary
    prompt = vocabulary.encode(text, add_special_tokens=True)
    output = vocabulary.encode_inside(" é😀😀 the")
    wanted = {"echo": True, "logprobs": 0, "stream": True, "max_tokens": 64}
    (submit,) = engine.generate([prompt] if as_ids else text, **wanted)
    for k, token in enumerate(output):
        told = None if k else prompt_columns(columns, prompt[1:])
        row = (submit.seq_id, token, FINISH_LENGTH if k == len(output) - 1 else RUNNING)
        engine.step(row, logprobs=columns([(0, [(token, -1.0)])]), prompt_logprobs=told)
    whole = text_of(engine.deltas())
    offsets = [offset for d in engine.deltas() for offset in d.text_offsets]
    shown = text.replace("<|im_start|>", "") if as_ids else text
    assert whole == shown + " é😀😀 the"
    entries = [entry for d in engine.deltas() for entry in d.logprobs or ()]
    assert [e.token_id for e in entries] == [*prompt, *output] and len(offsets) == len(entries)
    at = 0 if kind == "byte_level" else -1  # the tokenizer put a space before the text
    for entry, offset in zip(entries, offsets, strict=True):
        assert offset == len(whole.encode()[: max(at, 0)].decode(errors="ignore"))
        hidden = entry.token_id in vocabulary.special_ids and (as_ids or kind == "sentencepiece")
        at += 0 if hidden else len(entry.token_bytes)
    assert at == len(whole.encode()) and len(set(offsets)) < len(offsets)


@pytest.mark.parametrize("n", [1, 2])
def test_scoring_alone(make_engine: Callable, columns: Callable, n: int) -> None:
    engine = make_engine()
    prompt = ids(engine, "The fox")
    (submit,) = engine.generate("The fox", echo=True, logprobs=0, max_tokens=0, n=n)
    assert (submit.max_tokens, submit.n) == (0, 1)
    engine.step(
        (submit.seq_id, -1, FINISH_LENGTH), prompt_logprobs=prompt_columns(columns, prompt[1:])
    )
    deltas = engine.deltas()
    assert [d.index for d in deltas] == list(range(n))
    for delta in deltas:
        assert (delta.text, delta.finish_reason) == ("The fox", "length")
        assert [e.token_id for e in delta.logprobs or ()] == prompt
        assert delta.num_output_tokens == 0
    assert engine.core.open_requests == 0


def test_prompt_logprobs_come_once_and_for_every_sample(
    make_engine: Callable, columns: Callable
) -> None:
    engine = make_engine()
    prompt = ids(engine, "The fox")
    (submit,) = engine.generate("The fox", prompt_logprobs=1, n=2, stream=True, max_tokens=8)
    (token,) = ids(engine, "x")
    news = prompt_columns(columns, prompt[1:])
    engine.step((submit.seq_id, token, RUNNING), prompt_logprobs=news)
    # Told again (as after a preemption), and for the fork: nothing is counted twice.
    rows = [(submit.seq_id, token, FINISH_LENGTH), (submit.seq_id + 1, token, FINISH_LENGTH)]
    engine.step(*rows, prompt_logprobs=news)
    firsts = {0: [], 1: []}
    for delta in engine.deltas():
        firsts[delta.index].append(delta.prompt_logprobs)
    for lists in firsts.values():
        assert [e.token_id for e in lists[0]] == prompt
        assert lists[0][0].logprob is None
        assert all(more is None for more in lists[1:])


def test_echo_without_the_engine(make_engine: Callable) -> None:
    engine = make_engine()
    assert engine.generate(["ab", "c"], echo=True, max_tokens=0, n=2) == []
    (answer,) = engine.answers
    found = [(d.index, d.text, d.finish_reason, d.num_prompt_tokens) for d in answer.items]
    assert [f[:3] for f in found] == [
        (0, "ab", "length"),
        (1, "ab", "length"),
        (2, "c", "length"),
        (3, "c", "length"),
    ]
    assert engine.core.open_requests == 0


@pytest.mark.parametrize("stream", [True, False])
def test_echo_of_ids_is_their_text(make_engine: Callable, stream: bool) -> None:
    engine = make_engine()
    (submit,) = engine.generate(ids(engine, "The é"), echo=True, stream=stream)
    deltas = engine.run(submit.seq_id, ids(engine, "xy"))
    assert text_of(deltas) == "The éxy"


def test_a_continued_chat_with_echo(make_engine: Callable) -> None:
    engine = make_engine()
    messages = [*USER, {"role": "assistant", "content": "The answer"}]
    chat = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    for _ in range(2):
        (submit,) = engine.generate(chat=chat, echo=True, logprobs=0)
        assert submit.sampling.prompt_logprobs == -1
        assert text_of(engine.run(submit.seq_id, ids(engine, " is"))) == "The answer is"


# ---------------------------------------------------------------------- ends


def test_cancel_aborts_what_lives_and_then_there_is_silence(make_engine: Callable) -> None:
    engine = make_engine()
    first, second = engine.generate(["a", "b"], n=2, stream=True)
    (token,) = ids(engine, "x")
    engine.step((first.seq_id, token, FINISH_LENGTH))
    engine.core.handle(Cancel(1))
    assert engine.aborts == [first.seq_id + 1, second.seq_id, second.seq_id + 1]
    assert engine.step((second.seq_id, token, RUNNING), (second.seq_id, -1, FINISH_ABORT)) == []
    assert engine.core.open_requests == 0
    engine.core.handle(Cancel(1))
    engine.core.handle(Cancel(99))
    assert len(engine.aborts) == 3


def test_an_engine_error_ends_the_whole_request(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", n=3, stream=True)
    (other,) = engine.generate("b", request_id=2)
    error = SequenceError(submit.seq_id + 1, 500, "internal_error", "NaN in the logits", "nan")
    second = SequenceError(submit.seq_id + 2, 500, "internal_error", "NaN in the logits", "nan")
    (answer,) = engine.step(errors=[error, second])
    assert answer == Failed(1, 500, "internal_error", "NaN in the logits", code="nan")
    assert engine.aborts == [submit.seq_id, submit.seq_id + 2]
    assert engine.core.open_requests == 1
    assert engine.run(other.seq_id, ids(engine, "x"))[0].finish_reason == "length"


def test_an_aborted_sequence_says_so(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a")
    engine.step((submit.seq_id, *ids(engine, "x"), RUNNING))
    (answer,) = engine.step((submit.seq_id, -1, FINISH_ABORT))
    assert (answer.items[0].text, answer.items[0].finish_reason) == ("x", "abort")


@pytest.mark.parametrize("method", ["push", "next_delta"])
def test_a_fault_ends_its_request_alone(
    make_engine: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:  # fmt: skip
    """At a first token, and in a stream under way."""
    engine = make_engine()
    (bad,) = engine.generate("a", n=2, stream=True)
    (good,) = engine.generate("b", request_id=2, stream=True)
    (token,) = ids(engine, "x")
    rows = [(i, token, RUNNING) for i in (bad.seq_id, bad.seq_id + 1, good.seq_id)]
    if method == "next_delta":
        engine.step(*rows)
    sound = getattr(Choice, method)

    def failing(choice: Choice, *arguments: Any) -> Any:
        if choice.request_id == 1:
            raise RuntimeError("a bug")
        return sound(choice, *arguments)

    monkeypatch.setattr(Choice, method, failing)
    with caplog.at_level(logging.ERROR):
        deltas, failed = engine.step(*rows)
    assert [(d.request_id, d.text) for d in deltas.items] == [(2, "x")]
    assert (failed.request_id, failed.status) == (1, 500)
    assert "a bug" not in failed.message
    assert "a bug" in caplog.text
    assert engine.aborts == [bad.seq_id, bad.seq_id + 1]
    assert engine.core.open_requests == 1


def test_only_streams_that_ask_for_text_alone_take_the_short_way(make_engine: Callable) -> None:
    engine = make_engine()
    (token,) = ids(engine, "x")
    asked: list[dict[str, Any]] = [
        {},
        {"stop": ["y"]},
        {"logprobs": 0},
        {"return_token_ids": True},
        {"detokenize": False, "return_token_ids": True},
        {"stream": False},
    ]
    for number, options in enumerate(asked):
        (submit,) = engine.generate("a", request_id=number, **({"stream": True} | options))
        choice = engine.core._choices[submit.seq_id]
        assert not choice.is_plain  # before the first delta
        engine.step((submit.seq_id, token, RUNNING))
        assert choice.is_plain == (options == {})


def test_news_of_unknown_sequences_are_dropped(make_engine: Callable, columns: Callable) -> None:
    engine = make_engine()
    news = columns([(0, [(5, -1.0)])])
    rows = [(7, 5, RUNNING)]
    assert engine.step(*rows, logprobs=news, prompt_logprobs=news, cached=[(0, 3)]) == []
    assert engine.step(errors=[SequenceError(7, 500, "x", "y")]) == []
    engine.core.handle(StepOutput(b"", b"", b""))


# ---------------------------------------------------------------------- /tokenize, /detokenize


def test_tokenize_and_detokenize(make_engine: Callable) -> None:
    engine = make_engine("no_prefix", chat_template="{{ bos_token }}{{ messages[0].content }}")
    core = engine.core
    core.handle(Tokenize(5, prompt="the", return_token_strings=True))
    assert engine.answers[-1] == Tokens(
        5, [1, core.vocabulary.tokenizer.token_to_id("the")], ["<s>", "the"]
    )
    core.handle(Tokenize(5, prompt="the", add_special_tokens=False))
    assert len(engine.answers[-1].token_ids) == 1
    core.handle(Tokenize(5, chat=ChatPrompt(USER)))
    (submit,) = engine.generate(chat=USER)
    assert len(engine.answers[-1].token_ids) * 4 == len(submit.token_ids)
    core.handle(Detokenize(6, core.vocabulary.encode("the é")))
    assert engine.answers[-1] == DetokenizedText(6, "the é")
    core.handle(Detokenize(6, [10**6]))
    assert (engine.failed().status, engine.failed().param) == (400, "tokens")


def test_no_answer_is_left_out(make_engine: Callable) -> None:
    engine = make_engine()
    for request_id in range(1, 40):
        engine.generate("a", request_id=request_id, n=1 + request_id % 3, temperature=3.0)
    assert [a.request_id for a in engine.answers] == list(range(1, 40))
    assert not any(isinstance(a, Deltas) for a in engine.answers)
