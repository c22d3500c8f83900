"""Rows of /openapi.json for administrators, which a server tells of if it has any. Pure data."""

import msgspec

from zlm.frontend.openai.operation import ON_ADMIN, ON_ANY, Operation

TAG = "Administration"
_READS = ("401", "403", "503", *ON_ANY)
_CALLS = ("401", "403", "503", "504", *ON_ANY)


class AbortRequest(msgspec.Struct, kw_only=True):
    """The body of /abort_requests."""

    request_ids: list[str] | None = None
    all: bool | None = None


class Done(msgspec.Struct):
    """How many were meant: blocks that were forgotten, requests that were aborted, or 1."""

    count: int


class Sleeping(msgspec.Struct):
    """The answer of /is_sleeping."""

    is_sleeping: bool


class Load(msgspec.Struct):
    """The answer of /load; the front ends' own count is renewed every second."""

    server_load: int  # requests open at all front ends
    num_running: int  # sequences
    num_waiting: int
    kv_cache_usage: float


ADMIN = (
    Operation(
        path="/server_info",
        name="serverInfo",
        tag=TAG,
        summary="All settings, and what follows from them; no keys",
        answer=dict,
        errors=_READS,
    ),
    Operation(
        path="/load",
        name="load",
        tag=TAG,
        summary="What is open, runs and waits",
        answer=Load,
        errors=_READS,
    ),
    Operation(
        path="/reset_prefix_cache",
        method="post",
        name="resetPrefixCache",
        tag=TAG,
        summary="Forget cached prefixes; running requests go on",
        answer=Done,
        errors=_CALLS,
    ),
    Operation(
        path="/abort_requests",
        method="post",
        name="abortRequests",
        tag=TAG,
        summary="End requests with an error, by X-Request-Id or by the answer's id, or all",
        request=AbortRequest,
        alternatives=("request_ids", "all"),
        overrides={
            "request_ids": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1024,
                "items": {"type": "string", "minLength": 1, "maxLength": 256},
            },
            "all": {"type": "boolean", "const": True},
        },
        examples={"some": {"request_ids": ["job-17"]}, "all": {"all": True}},
        answer=Done,
        errors=ON_ADMIN,
    ),
    Operation(
        path="/sleep",
        method="post",
        name="sleep",
        tag=TAG,
        summary="Give up the model's memory until /wake_up; open requests end with an error",
        answer=Done,
        errors=_CALLS,
    ),
    Operation(
        path="/wake_up",
        method="post",
        name="wakeUp",
        tag=TAG,
        summary="Load the model again; /health tells when it is there",
        answer=Done,
        errors=_CALLS,
    ),
    Operation(
        path="/is_sleeping",
        name="isSleeping",
        tag=TAG,
        summary="Whether the server sleeps",
        answer=Sleeping,
        errors=_READS,
    ),
)
