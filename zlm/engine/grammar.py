"""Grammars: which tokens may follow in an output that must be of a given form.

``GrammarCompiler`` holds the vocabulary as the grammar library reads it and makes a
``GrammarMatcher`` of each ``Grammar``; a sequence owns a matcher of its own (``fork``) and tells it
every token. A matcher always holds the mask of the next token: it is computed when the token before
it is taken in, so the end of a grammar is known with its last token.

All work of the library is bounded by fuel (``LIMITS``): a matcher that runs out has failed, and its
sequence with it. Knows nothing of steps, slots or requests.
"""

import enum
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from zlm.errors import BadRequest, clip
from zlm.messages import Grammar, TokenBytes

MAX_TEXT_BYTES = 128 * 1024  # forced text costs 70 ns a byte and token (bench/LOG.md)
WHITE_SPACE = r" {1,4}|\r?\n[ \t]{0,40}"  # between the tokens of JSON: bounded
KINDS = ("json_object", "json_schema", "regex", "choice", "lark")

Words = npt.NDArray[np.int32]  # bit i % 32 of word i // 32: whether id i is allowed


class GrammarState(enum.Enum):
    """Where a matcher is: more tokens follow, nothing can follow, or it cannot go on."""

    OPEN = 0
    COMPLETE = 1
    FAILED = 2


class GrammarCompiler:
    """Compiles grammars for one vocabulary. May be used by several threads at once."""

    def __init__(self, tokens: TokenBytes, vocab_size: int) -> None:
        """Read the vocabulary; *vocab_size* is the number of logits a row has."""
        import llguidance  # 20 ms that only servers of grammars pay

        self._library = llguidance
        vocabulary = _LibraryVocabulary(tokens, vocab_size)
        size = len(vocabulary.tokens)
        vocabulary.library_tokenizer = self._tokenizer = llguidance.LLTokenizer(
            vocabulary,  # type: ignore[arg-type]  # it takes any object of this form
            eos_token=vocabulary.eos_ids,
        )
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._num_words = -(-size // 32)
        self._ends = mask_of(vocabulary.eos_ids, vocab_size)
        self._in_vocabulary = mask_of(range(vocab_size), vocab_size)

    def compile(self, grammar: Grammar) -> "GrammarMatcher":
        """Return a matcher at the start of *grammar*.

        Raises BadRequest, with the compiler's words, for a grammar that does not compile or that
        no text, or only the empty one, fits.
        """
        source = self._source(grammar)
        if grammar.frame:
            source = _framed(source, grammar.frame)
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise BadRequest(f"{_TITLES[grammar.kind]} does not compile: {_words(matcher)}")
        first = GrammarMatcher(matcher, self._num_words, self._in_vocabulary, self._ends)
        if first.state is GrammarState.FAILED:
            raise BadRequest(f"{_TITLES[grammar.kind]} accepts nothing: {_words(matcher)}")
        if first.state is GrammarState.COMPLETE:
            raise BadRequest(f"{_TITLES[grammar.kind]} accepts nothing but an empty text")
        return first

    def _source(self, grammar: Grammar) -> str:
        """Return *grammar* in the library's own form."""
        make, text = self._library.LLMatcher, grammar.text
        if len(text.encode()) > MAX_TEXT_BYTES:
            message = f"{_TITLES[grammar.kind]} has {len(text.encode())} bytes, the limit is"
            raise BadRequest(f"{message} {MAX_TEXT_BYTES}")
        try:
            match grammar.kind:
                case "json_object":
                    return make.grammar_from_json_schema('{"type": "object"}', _JSON_OPTIONS)
                case "json_schema" if text in ("true", "false"):
                    return make.grammar_from_json_schema(text)
                case "json_schema":
                    return make.grammar_from_json_schema(text, _JSON_OPTIONS)
                case "regex":
                    return make.grammar_from_regex(text)
                case "choice":
                    choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
                    return make.grammar_from_lark(f"start: {choices}")
                case "lark":
                    return make.grammar_from_lark(self._lark(text))
        except (ValueError, RecursionError) as error:
            message = f"{_TITLES[grammar.kind]} does not compile: {clip(str(error))}"
            raise BadRequest(message) from None
        raise BadRequest(f"there is no grammar of kind {clip(grammar.kind)}")

    def _lark(self, text: str) -> str:
        """Return *text*, which may be EBNF as GBNF writes it, as Lark."""
        if "::=" not in text:
            return text
        try:
            return str(self._library.gbnf_to_lark.any_to_lark(text))
        except Exception as error:  # whatever the converter stumbles over
            message = f"the grammar is not EBNF: {clip(str(error))}"
            raise BadRequest(message) from None


def _framed(source: str, frame: str) -> str:
    """Return *frame* with the grammar *source* as its ``@answer``."""
    inner = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    answer = {**inner[0], "name": "answer"}
    return json.dumps({"grammars": [{"lark_grammar": frame}, answer, *inner[1:]]})


_JSON_OPTIONS: Any = {"whitespace_pattern": WHITE_SPACE}
_TITLES = {
    "json_object": "json_object",
    "json_schema": "the JSON schema",
    "regex": "the regex",
    "choice": "the choice",
    "lark": "the grammar",
}


class GrammarMatcher:
    """Where one sequence is in its grammar. Owns the mask of its next token."""

    __slots__ = ("_buffer", "_ends", "_in_vocabulary", "_matcher", "state", "words")

    def __init__(self, matcher: Any, num_words: int, in_vocabulary: Words, ends: Words) -> None:
        """*in_vocabulary* are the ids that have a logit, *ends* those that end a text."""
        self._matcher = matcher
        self._in_vocabulary = in_vocabulary
        self._ends = ends
        self._buffer = np.zeros(num_words, np.int32)
        self.words: Words = in_vocabulary  # ids that may come next, as long as it is OPEN
        self.state = GrammarState.OPEN
        self._compute()

    def fork(self, *, ignore_eos: bool = False) -> "GrammarMatcher":
        """Return a matcher at the same place; with *ignore_eos* it goes on wherever it can."""
        other = GrammarMatcher.__new__(GrammarMatcher)
        other._matcher = self._matcher.deep_copy()
        other._in_vocabulary = (
            self._in_vocabulary & ~self._ends if ignore_eos else (self._in_vocabulary)
        )
        other._ends = self._ends
        other._buffer = self._buffer.copy()
        other.words = self.words & other._in_vocabulary
        other.state = self.state
        return other

    def advance(self, token: int) -> None:
        """Take the next token and compute what may follow it."""
        if not self._matcher.consume_token(token):
            self.state = GrammarState.FAILED
        elif self._matcher.is_stopped():
            self.state = GrammarState.COMPLETE
        else:
            self._compute()

    @property
    def problem(self) -> str:
        """What the library says of a matcher that FAILED."""
        return _words(self._matcher)

    def _compute(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        if self._matcher.is_error():
            self.state = GrammarState.FAILED
            return
        self.words = self._buffer[: len(self._in_vocabulary)] & self._in_vocabulary
        if not (self.words & ~self._ends).any():
            # What is left is the end, if it is one.
            accepts = self._matcher.is_accepting()
            self.state = GrammarState.COMPLETE if accepts else GrammarState.FAILED


class _LibraryVocabulary:
    """A vocabulary of at least *size* ids in the form that the library asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: TokenBytes, size: int) -> None:
        ends = np.frombuffer(tokens.ends, np.int32).tolist()
        starts = [0, *ends[:-1]]
        data = tokens.data
        self.tokens = [data[start:end] for start, end in zip(starts, ends, strict=True)]
        self.tokens += [b""] * (size - len(self.tokens))
        self.eos_ids: list[int] = np.frombuffer(tokens.eos_ids, np.int32).tolist()
        if not self.eos_ids:  # the library wants one: an id that no model has
            self.eos_ids = [len(self.tokens)]
            self.tokens.append(b"")
        self.special_token_ids: list[int] = np.frombuffer(tokens.special_ids, np.int32).tolist()
        self.eos_token_id = self.eos_ids[0]
        self.library_tokenizer: Any = None

    def __call__(self, text: str) -> list[int]:
        """Return the tokens that a text is forced into: the longest ones."""
        tokens: list[int] = self.library_tokenizer.greedy_tokenize(text)
        return tokens


def mask_of(ids: Any, vocab_size: int) -> Words:
    """Return the mask of *ids*, ceil(vocab_size / 32) words; those beyond it are left out."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[[i for i in ids if 0 <= i < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _words(matcher: Any) -> str:
    """Return what the library says is wrong, on one line, its middle left out if it is long."""
    text = " ".join(str(matcher.get_error()).replace("<non-verbose/>", "").split())
    text = {"NoExtensionBias": "no token can begin it"}.get(text, text)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}"
