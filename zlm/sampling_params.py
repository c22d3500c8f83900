"""How one request is sampled: the public value type, in vLLM's names, and its range checks.

Knows nothing of models or vocabularies: what depends on them (ids within the vocabulary, lengths
within the context) is checked by the tokenizer process. Imports only the error tree.
"""

import enum
import math
import sys
from typing import Any

import msgspec

from zlm.errors import BadRequest, clip

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_CHOICES = 1024
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


class SamplingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that one request may ask for; a server may set others."""

    max_n: int = MAX_N
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_characters: int = MAX_STOP_CHARACTERS  # of each stop string
    max_logit_bias: int = MAX_LOGIT_BIAS  # entries
    max_bad_words: int = MAX_BAD_WORDS
    max_logprobs: int = MAX_LOGPROBS  # alternatives beside a token; the sampler has room for 20


DEFAULT_LIMITS = SamplingLimits()
_NONE = sys.maxsize
NO_LIMITS = SamplingLimits(**dict.fromkeys(SamplingLimits.__struct_fields__, _NONE))
FORMS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The form that an output must have: exactly one of ``FORMS``.

    json: a JSON schema, as a dict or as text.  json_object: any JSON object.  regex: what the whole
    output matches.  choice: the texts it may be.  grammar: Lark, or EBNF as GBNF writes it.

    disable_any_whitespace: no white space between the tokens of JSON.  whitespace_pattern: the
    regex of what may stand there.  strict: a keyword of the schema that cannot be enforced is an
    error; else it is ignored.  source: the name of the request's field, for errors.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    strict: bool = True
    source: str = "structured_outputs"

    def check(self) -> None:
        """Raise BadRequest, naming the field, unless it says one form and can say it."""
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if self.json is False:
            given = ["json", *given]
        if len(given) != 1:
            names, got = ", ".join(FORMS), " and ".join(given) or "none"
            message = f"{self.source} needs exactly one of {names}, got {got}"
            raise BadRequest(message, param=self.source)
        if self.choice is not None and not self.choice:
            raise BadRequest(f"{self.source}: choice must not be empty", param=self.source)
        _count(f"{self.source}.choice", self.choice, MAX_CHOICES)
        of_json = self.disable_any_whitespace or self.whitespace_pattern is not None
        if of_json and given[0] not in ("json", "json_object"):
            message = f"{self.source}: white space can be set for json and json_object only"
            raise BadRequest(message, param=self.source)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            message = "disable_any_whitespace and whitespace_pattern exclude each other"
            raise BadRequest(f"{self.source}: {message}", param=self.source)


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of one request. ``None`` means "the model's default".

    The model's default of temperature, top_p, top_k, min_p and repetition_penalty is what its
    ``generation_config.json`` says, else the neutral value (1.0, 1.0, 0, 0.0, 1.0).

    temperature: 0..2; below 1e-5 is greedy.  top_p: 0..1 (0 keeps the best token).
    top_k: -1 or 0 is off.  min_p: 0..1.  presence_penalty, frequency_penalty: -2..2, over output.
    repetition_penalty: > 0, over prompt and output.  seed: signed 64-bit, None draws a fresh one.
    max_tokens: most output tokens (None: as many as the context has room for).
    min_tokens: no EOS, stop id or stop string ends the output before so many tokens.
    stop, stop_token_ids: strings and ids that end the output; left out of the text, as an EOS
    token is, unless include_stop_str_in_output (special ones still if skip_special_tokens).
    logprobs: how many alternatives to report beside each sampled token (0: only the sampled one).
    prompt_logprobs: the same for prompt tokens.  logit_bias: id to bias, -100..100.
    bad_words: words never produced.  truncate_prompt_tokens: keep so many last prompt tokens (-1:
    as many as leave room for max_tokens, or for one token).
    structured_outputs: the form the output must have.
    output_kind: what the outputs of ``LLM.stream`` and ``AsyncLLM`` hold; servers ignore it.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        """Raise BadRequest, a ValueError, for what no server takes, whatever its limits are."""
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            try:  # a dict of its fields, as in a request's body
                self.structured_outputs = msgspec.convert(form, StructuredOutputsParams)
            except msgspec.ValidationError as error:
                message = f"structured_outputs must be StructuredOutputsParams: {error}"
                raise BadRequest(message, param="structured_outputs") from error
        self.check(NO_LIMITS)

    def stop_strings(self) -> list[str]:
        """Return ``stop`` as a list, whatever form it was given in."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check(self, limits: SamplingLimits = DEFAULT_LIMITS) -> None:
        """Raise BadRequest, naming the field and the limit, if a value is out of range."""
        _range("n", self.n, 1, limits.max_n)
        _range("temperature", self.temperature, 0.0, 2.0)
        _range("top_p", self.top_p, 0.0, 1.0)
        _range("top_k", self.top_k, -1, 2**31 - 1)
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _range("seed", self.seed, MIN_SEED, MAX_SEED)
        _range("logprobs", self.logprobs, 0, limits.max_logprobs)
        _range("prompt_logprobs", self.prompt_logprobs, 0, limits.max_logprobs)
        _range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _range("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1)
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1 for what fits, got 0"
            raise BadRequest(message, param="truncate_prompt_tokens")
        penalty = self.repetition_penalty
        _number("repetition_penalty", penalty)
        if penalty is not None and not (math.isfinite(penalty) and penalty > 0):
            message = f"repetition_penalty must be greater than 0, got {penalty}"
            raise BadRequest(message, param="repetition_penalty")
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})"
            raise BadRequest(message, param="min_tokens")
        _count("stop", self.stop_strings(), limits.max_stop_strings)
        for text in self.stop_strings():
            if not isinstance(text, str):
                raise BadRequest(f"stop must be texts, got {clip(text)}", param="stop")
            if not text:
                raise BadRequest("stop must not contain an empty string", param="stop")
            if len(text) > limits.max_stop_characters:
                message = f"a stop string has {len(text)} characters, the limit is"
                raise BadRequest(f"{message} {limits.max_stop_characters}", param="stop")
        _count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _count("bad_words", self.bad_words, limits.max_bad_words)
        if self.bad_words is not None and not all(self.bad_words):
            raise BadRequest("bad_words must not contain an empty string", param="bad_words")
        _count("logit_bias", self.logit_bias, limits.max_logit_bias, (dict,))
        for bias in (self.logit_bias or {}).values():
            _range("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        if self.structured_outputs is not None:
            self.structured_outputs.check()


class BeamSearchParams(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Parameters of beam search: the likeliest outputs, not drawn but searched for.

    beam_width: how many are followed, and returned.  max_tokens: most output tokens.
    ignore_eos: EOS is a token like others.  length_penalty: a finished output's score is its
    log-probability over its number of tokens to this power (0: the log-probability; over 0 favours
    long ones).  include_stop_str_in_output: the text shows the EOS token.  temperature: 0 or 1,
    which are the same here: probabilities are the model's own.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def check(self) -> None:
        """Raise BadRequest, naming the field and the limit, if a value is out of range."""
        _range("beam_width", self.beam_width, 1, MAX_LOGPROBS - 1)
        _range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _range("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.temperature not in (0.0, 1.0):
            message = f"temperature must be 0 or 1 in beam search, got {clip(self.temperature)}"
            raise BadRequest(message, param="temperature")


def _range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    _number(name, value, whole=isinstance(low, int))
    if not low <= value <= high:
        unbounded = high == _NONE and value < low
        bounds = f"at least {low}" if unbounded else f"between {low} and {high}"
        raise BadRequest(f"{name} must be {bounds}, got {clip(value)}", param=name)


def _number(name: str, value: float | None, *, whole: bool = False) -> None:
    if value is not None and not isinstance(value, int if whole else int | float):
        kind = "an integer" if whole else "a number"
        raise BadRequest(f"{name} must be {kind}, got {clip(repr(value))}", param=name)


def _count(
    name: str,
    values: list | dict | None,
    most: int,
    kinds: tuple[type, ...] = (list, tuple, set, frozenset),
) -> None:
    if values is None:
        return
    if not isinstance(values, kinds):
        message = f"{name} must be a {kinds[0].__name__}, got {clip(repr(values))}"
        raise BadRequest(message, param=name)
    if len(values) > most:
        message = f"{name} has {len(values)} entries, the limit is {most}"
        raise BadRequest(message, param=name)
