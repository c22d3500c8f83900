"""Fields that completions and chat share, and what they become.

``null`` means absent everywhere. Three kinds of field: those that mean something here, OpenAI's
that change nothing here and are accepted, and those that would change the answer in a way that is
not supported, which are refused by name whenever they ask for something.
"""

import re
from typing import Any

import msgspec

from zlm.config import Resolved, ServerOptions
from zlm.errors import BadRequest, NotFound, clip
from zlm.frontend.openai import structured
from zlm.frontend.openai.body import check_depth
from zlm.sampling_params import SamplingParams

MAX_SALT_CHARACTERS = 256
MAX_TIMEOUT_SECONDS = 86400
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


class CommonFields(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    # Sampling (see SamplingParams for the ranges).
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    # Prompt and answer.
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    # Accepted, change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Refused when they ask for something.
    best_of: int | None = None  # of n answers, the n best
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    logits_processors: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None

    def wants_stream(self) -> bool:
        return bool(self.stream)


# Field → the values, besides null, that ask for nothing. Any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
}
_GUIDED = tuple(name for name in CommonFields.__struct_fields__ if name.startswith("guided_"))
_SAMPLING = {*CommonFields.__struct_fields__} & {*SamplingParams.__struct_fields__} - {
    *("max_tokens", "logit_bias", "structured_outputs")  # those are not taken as they are
}


def refuse(fields: msgspec.Struct, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raise BadRequest if a field in *neutral* has a value that is not one of its harmless ones."""
    for name, harmless in neutral.items():
        value = getattr(fields, name)
        if value is not None and not any(value == h and type(value) is type(h) for h in harmless):
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")


def refuse_unsupported(fields: CommonFields) -> None:
    """Raise BadRequest, naming it, if a field asks for what neither endpoint does."""
    refuse(fields, NEUTRAL)
    if fields.best_of is not None and fields.best_of != (1 if fields.n is None else fields.n):
        message = f"best_of must be equal to n, or absent, got {clip(fields.best_of)}"
        raise BadRequest(message, param="best_of", code="unsupported_parameter")
    for name in _GUIDED:
        if getattr(fields, name) is not None:
            message = f"{name} is a field of old servers; structured_outputs took its place"
            raise BadRequest(message, param=name, code="unsupported_parameter")


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream tells usage."""

    include_usage: bool = False  # one more chunk before the end
    continuous: bool = False  # in every chunk


def stream_options(fields: CommonFields, unknown_fields: str) -> StreamOptions:
    """Return the options of *fields*' stream; raise BadRequest if they are not usable."""
    given = fields.stream_options
    if given is None:
        return StreamOptions()
    if not fields.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    check_depth(given, "stream_options")
    for name, value in given.items():
        param = f"stream_options.{clip(name)}"
        if name not in STREAM_OPTIONS:
            if unknown_fields == "ignore":
                continue
            known = ", ".join(STREAM_OPTIONS)
            message = f"unknown field {param}, known are {known}"
            raise BadRequest(message, param=param, code="unknown_field")
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{param} must be true or false, got {clip(value)}", param=param)
    return StreamOptions(
        include_usage=bool(given.get("include_usage")),
        continuous=bool(given.get("continuous_usage_stats")),
    )


def model_name(asked: str | None, resolved: Resolved) -> str:
    """Return the name the answer bears; raise NotFound if *asked* is not served."""
    if asked is None:
        return resolved.served_names[0]
    if asked in resolved.served_names:
        return asked
    served = ", ".join(resolved.served_names)
    message = f"the model {clip(asked)!r} is not served here; served: {served}"
    raise NotFound(message, param="model", code="model_not_found")


def sampling_params(
    fields: CommonFields,
    server: ServerOptions,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Return the checked parameters of *fields*; raise BadRequest for a value out of range."""
    given = {name: getattr(fields, name) for name in _SAMPLING}
    strict = server.unknown_fields != "ignore"
    form = structured.params(fields.response_format, fields.structured_outputs, strict=strict)
    params = SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(fields.logit_bias),
        structured_outputs=form,
    )
    params.check(server.limits.sampling)
    return params


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """Return *given* with its keys as token ids; raise BadRequest for a key that is none."""
    if given is None:
        return None
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            message = f"logit_bias has the key {clip(key)!r}, a token id is needed"
            raise BadRequest(message, param="logit_bias")
    return {int(key): bias for key, bias in given.items()}


def cache_salt(fields: CommonFields) -> str:
    """Return the salt, checked for length."""
    salt = fields.cache_salt or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        message = f"cache_salt has {len(salt)} characters, the limit is {MAX_SALT_CHARACTERS}"
        raise BadRequest(message, param="cache_salt")
    return salt


def timeout(fields: CommonFields) -> float | None:
    """Return the seconds that the answer may take, checked; None: it has no limit of its own."""
    value = fields.timeout
    if value is not None and not 0 < value <= MAX_TIMEOUT_SECONDS:
        message = f"timeout must be over 0 and at most {MAX_TIMEOUT_SECONDS}, got {clip(value)}"
        raise BadRequest(message, param="timeout")
    return value


def priority(given: int | None) -> int:
    """Return the priority, checked to be a signed 64-bit integer."""
    value = given or 0
    if not -(2**63) <= value < 2**63:
        raise BadRequest("priority must be a signed 64-bit integer", param="priority")
    return value
