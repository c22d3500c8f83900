"""Grammars in the engine core: masks in time, ends, run-ahead, forks, preemption, aborts."""

import numpy as np
import pytest
from driver import EOS, TOKENS, VOCAB, Engine
from hypothesis import given, settings, strategies as st

from zlm.engine.grammar import MAX_TEXT_BYTES, GrammarCompiler, GrammarState, mask_of
from zlm.errors import BadRequest
from zlm.messages import (
    FINISH_ABORT,
    FINISH_EOS,
    FINISH_GRAMMAR,
    FINISH_LENGTH,
    Execute,
    Grammar,
    Masks,
    TokenBytes,
)

WORD = Grammar("regex", "[a-c]{5}")
OPEN = Grammar("regex", "[a-c]+")
PROMPT = list(range(4, 24))


def text(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token - 4) for token in tokens if token != EOS)


def ids_of(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENS, VOCAB)


# -------------------------------------------------------------------------------- matchers


def test_a_matcher_holds_the_mask_of_the_next_token(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("regex", "ab?c"))
    assert ids_of(matcher.words) == [4]
    matcher.advance(4)
    assert ids_of(matcher.words) == [5, 6] and matcher.state is GrammarState.OPEN
    other = matcher.fork()
    matcher.advance(6)
    assert matcher.state is GrammarState.COMPLETE
    assert other.state is GrammarState.OPEN and ids_of(other.words) == [5, 6]


def test_where_a_text_may_end_or_go_on_the_end_is_one_of_the_choices(
    compiler: GrammarCompiler,
) -> None:
    matcher = compiler.compile(OPEN)
    matcher.advance(5)
    assert ids_of(matcher.words) == [EOS, 4, 5, 6]
    assert ids_of(matcher.fork(ignore_eos=True).words) == [4, 5, 6]
    matcher.advance(EOS)
    assert matcher.state is GrammarState.COMPLETE


def test_a_token_that_does_not_fit_fails_the_matcher(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(OPEN)
    matcher.advance(20)
    assert matcher.state is GrammarState.FAILED and matcher.problem


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "not-a-type"}', "not-a-type"),
        ("json_schema", '{"$ref": "#/$defs/x"}', "/$defs/x"),
        ("json_schema", '{"$ref": "#"}', "accepts nothing"),
        ("json_schema", "false", "schema is false"),
        ("json_schema", '{"enum": []}', "empty"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "minLength"),
        ("json_schema", '{"type": "string", "pattern": "(a"}', "unclosed group"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", "[1]", "the JSON schema"),
        ("regex", "(a", "unclosed group"),
        ("regex", r"[^\s\S]", "accepts nothing"),
        ("regex", "", "empty text"),
        ("choice", '[""]', "empty text"),
        ("choice", '["\\u00e9"]', "accepts nothing"),  # no token has those bytes
        ("lark", "start: nothing", "nothing"),
        ("lark", "start:: 5", "the grammar"),
        ("lark", "root ::= ", "the grammar"),
        ("regex", "a" * (MAX_TEXT_BYTES + 1), str(MAX_TEXT_BYTES)),
    ],
)
def test_hopeless_grammars_are_refused_in_the_compilers_words(
    compiler: GrammarCompiler, kind: str, text: str, words: str
) -> None:
    """CASES 75 and 78: what does not compile, cannot be enforced, or accepts nothing."""
    with pytest.raises(BadRequest) as refused:
        compiler.compile(Grammar(kind, text))
    assert words in refused.value.message
    assert len(refused.value.message) < 300


def test_every_kind_of_grammar(compiler: GrammarCompiler) -> None:
    for grammar, first in (
        (Grammar("choice", '["ab", "cd"]'), [4, 6]),
        (Grammar("lark", 'start: "x" start | "y"'), [27, 28]),
        (Grammar("lark", 'root ::= "b" | "c" root'), [5, 6]),
        (Grammar("regex", "^(d|e)$"), [7, 8]),
    ):
        assert ids_of(compiler.compile(grammar).words) == first, grammar


def test_white_space_in_json_is_bounded() -> None:
    """CASES 76: no endless runs of white space."""
    signs = [bytes([code]) for code in range(128)]
    tokens = TokenBytes(
        b"".join(signs) + b"<eos>",
        np.array([*range(1, 129), 133], np.int32).tobytes(),
        np.array([128], np.int32).tobytes(),
        np.array([128], np.int32).tobytes(),
    )
    for kind, text in (("json_object", ""), ("json_schema", '{"type": "array"}')):
        matcher = GrammarCompiler(tokens, 129).compile(Grammar(kind, text))
        matcher.advance(ord("{" if kind == "json_object" else "["))
        for sign, most in ((" ", 4), ("\t", 0)):
            count, other = 0, matcher.fork()
            while count < 100 and ord(sign) in ids_of(other.words):
                other.advance(ord(sign))
                count += 1
            assert count == most
        matcher.advance(ord("\n"))
        count = 0
        while count < 100 and set(map(ord, " \t\n\r")) & set(ids_of(matcher.words)):
            matcher.advance(ord(" "))
            count += 1
        assert count == 40


def test_a_vocabulary_smaller_or_larger_than_the_logits() -> None:
    for vocab_size in (8, 29, 100):
        matcher = GrammarCompiler(TOKENS, vocab_size).compile(Grammar("regex", "[a-y]+"))
        assert ids_of(matcher.words) == [i for i in range(4, 29) if i < vocab_size]
        assert len(matcher.words) == -(-vocab_size // 32)
    assert ids_of(mask_of([0, 31, 40], 33)) == [0, 31]


def test_a_vocabulary_without_an_end_still_ends_with_the_grammar() -> None:
    tokens = TokenBytes(TOKENS.data, TOKENS.ends, b"", b"")
    matcher = GrammarCompiler(tokens, VOCAB).compile(Grammar("regex", "ab"))
    matcher.advance(4)
    matcher.advance(5)
    assert matcher.state is GrammarState.COMPLETE


# -------------------------------------------------------------------------------- the engine


def test_a_grammar_ends_its_sequence_with_stop() -> None:
    engine = Engine()
    seq_id = engine.submit(PROMPT, 12, grammar=WORD)
    engine.run()
    told = engine.told[seq_id]
    assert told.finish == FINISH_GRAMMAR and len(told.tokens) == 5
    assert set(text(told.tokens)) <= set("abc")
    assert engine.core.stats().success["stop"] == 1


def test_cut_by_the_limit_is_length_and_complete_at_the_limit_is_stop() -> None:
    """CASES 76."""
    engine = Engine()
    cut, whole = engine.submit(PROMPT, 4, grammar=WORD), engine.submit(PROMPT, 5, grammar=WORD)
    engine.run()
    assert engine.told[cut].finish == FINISH_LENGTH
    assert engine.told[whole].finish == FINISH_GRAMMAR


def test_min_tokens_and_ignore_eos_hold_back_ends_that_are_choices_only() -> None:
    engine = Engine(max_num_seqs=8)
    held = engine.submit(PROMPT, 30, grammar=OPEN, min_tokens=20)
    ignored = engine.submit(PROMPT[1:], 30, grammar=OPEN, ignore_eos=True)
    word = engine.submit(PROMPT[2:], 30, grammar=WORD, min_tokens=20, ignore_eos=True)
    engine.run()
    assert len(engine.told[held].tokens) >= 20
    assert engine.told[ignored].finish == FINISH_LENGTH
    assert engine.told[word].finish == FINISH_GRAMMAR and len(engine.told[word].tokens) == 5


def test_an_end_that_the_model_chooses_is_an_eos() -> None:
    engine = Engine(max_num_seqs=8)
    ids = [engine.submit(PROMPT[k:], 40, grammar=OPEN) for k in range(12)]
    engine.run()
    finishes = {engine.told[seq_id].finish for seq_id in ids}
    assert FINISH_EOS in finishes and finishes <= {FINISH_EOS, FINISH_LENGTH}


def test_a_step_with_a_grammar_is_sent_ahead_and_its_masks_follow_the_result_before() -> None:
    engine = Engine()
    engine.submit(PROMPT[:9], 8, grammar=WORD)
    messages = list(engine.core.next_steps(1.0))
    assert [type(m) for m in messages] == [Execute, Masks, Execute]
    first, masks, second = messages
    assert first.masked and second.masked and masks.step == first.step
    assert list(engine.core.next_steps(2.0)) == []
    engine.core.apply(engine.worker.execute(first, masks), 3.0)
    masks, third = engine.core.next_steps(4.0)
    assert isinstance(masks, Masks) and masks.step == second.step and third.masked


def test_steps_without_a_grammar_wait_for_no_masks() -> None:
    engine = Engine()
    engine.submit(PROMPT, 8)
    assert all(not step.masked for step in engine.core.next_steps(1.0))


def test_samples_of_a_prompt_have_grammars_of_their_own() -> None:
    engine = Engine(num_blocks=40, max_num_seqs=8)
    first = engine.submit(PROMPT, 20, n=4, grammar=Grammar("regex", "[a-y]{6}z?"))
    engine.run()
    texts = {text(engine.told[first + k].tokens) for k in range(4)}
    assert len(texts) == 4 and {len(t) for t in texts} == {6}


def test_preemption_keeps_a_grammar_where_it_was() -> None:
    engine = Engine(num_blocks=12, max_num_seqs=4)
    ids = [engine.submit(PROMPT[k:], 24, grammar=Grammar("regex", "[a-y]{20}")) for k in range(4)]
    engine.run()
    assert engine.core.stats().preemptions > 0
    assert {engine.told[seq_id].finish for seq_id in ids} == {FINISH_GRAMMAR}


def test_an_abort_while_the_grammar_is_compiled() -> None:
    engine = Engine()
    engine.compiles_later = True
    first = engine.submit(PROMPT, 8, n=2, grammar=WORD)
    assert not engine.core.is_idle and engine.core.stats().num_waiting == 1
    engine.abort(first)
    while engine.core.num_compiling:
        engine._hear(engine.core.take_compiled(engine._tick()))
    assert engine.told[first].finish == FINISH_ABORT
    engine.run()
    assert engine.told[first + 1].finish == FINISH_GRAMMAR


def test_others_run_while_a_grammar_is_compiled() -> None:
    """A grammar that takes long holds nobody up: it is compiled on a thread."""
    engine = Engine()
    engine.compiles_later = True
    waiting = engine.submit(PROMPT, 8, grammar=Grammar("regex", "(b{1,50}){1,50}"))
    other = engine.submit(PROMPT, 8)
    while engine.send() or engine.deliver():
        engine.check()
    assert engine.told[other].over and not engine.told[waiting].over
    while engine.core.num_compiling:
        engine._hear(engine.core.take_compiled(engine._tick()))
    engine.run()
    assert engine.told[waiting].over


def test_a_grammar_that_the_engine_cannot_compile_ends_every_sample_in_an_error() -> None:
    engine = Engine()
    first = engine.submit(PROMPT, 8, n=2, grammar=Grammar("regex", "(a"))
    engine.run()
    for k in range(2):
        error = engine.told[first + k].error
        assert error is not None and error.status == 400 and "unclosed" in error.message
    assert engine.core.stats().success["error"] == 2


GRAMMARS = [
    None,
    WORD,
    OPEN,
    Grammar("choice", '["abc", "abd", "xyxy"]'),
    Grammar("lark", 'start: "a" start | "b"'),
]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_company_any_order_of_events(data: st.DataObject) -> None:
    """Each sequence's tokens are those it has alone, whatever happens around it."""
    engine = Engine(
        num_blocks=data.draw(st.sampled_from([12, 17, 40])),
        max_num_seqs=data.draw(st.sampled_from([2, 5])),
        run_ahead=data.draw(st.sampled_from([1, 2, 3])),
    )
    ids: list[int] = []
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["submit", "submit", "send", "deliver", "abort"])):
            case "submit":
                start = data.draw(st.integers(0, 18))
                n = data.draw(st.sampled_from([1, 1, 3]))
                first = engine.submit(
                    PROMPT[start:],
                    data.draw(st.integers(1, 12)),
                    n=n,
                    grammar=data.draw(st.sampled_from(GRAMMARS)),
                    ignore_eos=data.draw(st.booleans()),
                )
                ids += range(first, first + n)
            case "send":
                engine.send()
            case "deliver":
                engine.deliver()
            case "abort" if ids:
                engine.abort(data.draw(st.sampled_from(ids)))
        engine.check()
    engine.run()
