"""Requests with a grammar: made of what the client says, tried apart, in bounded time."""

import json
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zlm.config import ServerLimits, ServerOptions
from zlm.engine.grammar import GrammarCompiler
from zlm.errors import BadRequest
from zlm.messages import FINISH_GRAMMAR, Cancel, EngineReady, Grammar
from zlm.sampling_params import StructuredOutputsParams
from zlm.tokenizer.grammar_checks import token_bytes
from zlm.tokenizer.grammars import grammar_of
from zlm.tokenizer.token_table import TokenTable


def form(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**fields)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json_object": True}, Grammar("json_object")),
        ({"json": {"type": "null"}}, Grammar("json_schema", '{"type": "null"}')),
        ({"json": ' {"const": "é"}'}, Grammar("json_schema", '{"const": "é"}')),
        ({"json": True}, Grammar("json_schema", "true")),
        ({"json": False}, Grammar("json_schema", "false")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"choice": ["a", "é"]}, Grammar("choice", '["a", "é"]')),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        (
            {"json": {}, "strict": False},
            Grammar("json_schema", '{"x-guidance": {"lenient": true, "coerce_one_of": true}}'),
        ),
        (
            {"json_object": True, "whitespace_pattern": " ?"},
            Grammar(
                "json_schema", '{"type": "object", "x-guidance": {"whitespace_pattern": " ?"}}'
            ),
        ),
    ],
)
def test_what_a_client_says_becomes_a_grammar(fields: dict[str, Any], expected: Grammar) -> None:
    assert grammar_of(StructuredOutputsParams(**fields)) == expected


@pytest.mark.parametrize("schema", ["{", "5", "[" * 100_000, {"a": float("nan")}])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(BadRequest, match="JSON") as refused:
        grammar_of(StructuredOutputsParams(json=schema, source="response_format"))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "no_prefix", "metaspace"])
def test_the_engine_is_told_what_tokens_stand_for(make_engine: Callable, kind: str) -> None:
    """A grammar's own tokens spell a text of it, in every kind of vocabulary."""
    vocabulary = make_engine(kind).core.vocabulary
    tokens = token_bytes(vocabulary, TokenTable(vocabulary), (2,))
    compiler = GrammarCompiler(tokens, 512)
    text = "{the} is" if kind == "metaspace" else '{"é": 😀 the}'  # that one has no é
    matcher = compiler.compile(Grammar("choice", json.dumps([text])))
    spelled = b""
    ends = np.frombuffer(tokens.ends, np.int32).tolist()
    while matcher.state.name == "OPEN":
        token = int(
            np.flatnonzero(np.unpackbits(matcher.words.view(np.uint8), bitorder="little"))[0]
        )
        spelled += tokens.data[ends[token - 1] : ends[token]]
        matcher.advance(token)
    assert spelled.decode() == text and matcher.state.name == "COMPLETE"


def test_a_good_grammar_is_submitted_after_the_vocabulary_which_is_told_once(
    make_engine: Callable,
) -> None:
    engine = make_engine()
    (submit,) = engine.generate("The fox", **form(regex="[ab]{2}"))
    assert submit.grammar == Grammar("regex", "[ab]{2}") and len(engine.vocabularies) == 1
    engine.generate("The fox", request_id=2, **form(choice=["a", "b"]))
    assert len(engine.vocabularies) == 1
    engine.core.handle(EngineReady([9], 128))  # another engine, which knows nothing
    engine.generate("The fox", request_id=3, **form(regex="[ab]{2}"))
    assert len(engine.vocabularies) == 2
    (plain,) = engine.generate("The fox", request_id=4)
    assert plain.grammar is None


def test_the_token_that_ends_a_grammar_is_shown(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("The fox", **form(regex="ab"))
    ids = engine.core.vocabulary.encode("ab")
    deltas = engine.run(submit.seq_id, ids, finish=FINISH_GRAMMAR)
    assert (deltas[-1].text, deltas[-1].finish_reason) == ("ab", "stop")
    assert deltas[-1].stop_reason is None


def test_a_bad_grammar_is_a_400_and_nothing_is_submitted(make_engine: Callable) -> None:
    """CASES 75."""
    engine = make_engine()
    assert engine.generate("The fox", **form(regex="(a", source="response_format")) == []
    failed = engine.failed()
    assert (failed.status, failed.param) == (400, "response_format")
    assert "unclosed group" in failed.message
    assert engine.core.open_requests == 0
    assert engine.generate("The fox", request_id=2) != []


def test_a_grammar_that_takes_too_long_is_given_up(make_engine: Callable) -> None:
    """CASES 75: the process that tries it is killed, and the next grammar is tried by another."""
    limits = ServerLimits(grammar_seconds=0.5)
    engine = make_engine(server=ServerOptions(limits=limits))
    rest = {"enum": ["x" * 40 + str(number) for number in range(2500)]}
    bomb = {"allOf": [rest] * 1, "anyOf": [{"allOf": [{"$ref": "#"}]}]}
    assert engine.generate("The fox", **form(regex="ab")) != []
    slow = engine.core._grammars._all[0]
    slow._seconds = 1e-9
    assert engine.generate("The fox", request_id=2, **form(json=bomb)) == []
    assert (engine.failed().status, engine.failed().request_id) == (400, 2)
    assert "longer than" in engine.failed().message
    slow._seconds = 5.0
    assert engine.generate("The fox", request_id=3, **form(regex="abc")) != []


def test_checks_do_not_block_and_cancelled_requests_are_dropped(make_engine: Callable) -> None:
    done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    engine = make_engine(run_later=done.put)
    assert engine.generate("The fox", **form(regex="ab")) == []
    assert engine.generate("The fox", request_id=2, **form(regex="abc")) == []
    assert engine.core.open_requests == 2
    (plain,) = engine.generate("The fox", request_id=3)  # passes those that wait
    engine.core.handle(Cancel(1))
    for _ in range(2):
        done.get(timeout=30)()
    grammars = [submit.grammar for submit in engine.submits]
    assert grammars == [None, Grammar("regex", "abc")]
    assert engine.core.open_requests == 2
    (again,) = engine.generate("The fox", request_id=4, **form(regex="ab"))  # known to be fine
    assert again.grammar == Grammar("regex", "ab")
    assert plain.seq_id != again.seq_id
