"""Processes that try what clients send: whose fault it is that there is no answer."""

import json

import numpy as np

from zlm.errors import BadRequest, Internal
from zlm.messages import Grammar, TokenBytes
from zlm.tokenizer.grammar_process import GrammarProcess

BYTES = bytes(range(256))
ENDS = np.arange(1, 257, dtype=np.int32).tobytes()
EOS = np.zeros(1, np.int32).tobytes()
DIGITS = Grammar("regex", "[0-9]{4}")


def test_a_child_that_cannot_begin_is_no_fault_of_the_grammar() -> None:
    process = GrammarProcess(lambda: TokenBytes(b"", b"?", b"", b""), 256, 20.0)
    problem = process.check(DIGITS)
    assert isinstance(problem, Internal) and "ended before it was ready" in problem.message


def test_after_a_grammar_that_is_too_large_comes_the_next() -> None:
    process = GrammarProcess(lambda: TokenBytes(BYTES, ENDS, b"", EOS), 256, 20.0)
    try:
        assert process.check(DIGITS) is None
        bad = process.check(Grammar("json_schema", json.dumps({"type": "nothing"})))
        assert isinstance(bad, BadRequest)
        assert process.check(DIGITS) is None
    finally:
        process.close()
