"""The log's line for one request: what was asked, how it was answered, and where its time went.

One record of ``zlm.frontend.access`` a request: a line of text, and the same facts as fields for a
structured log. Nothing of what a client has written is in it but its request id and the name of
the model; nothing secret: of a key only its name. Probes and the like are told at debug level.
"""

import logging
import time

from zlm.errors import clip
from zlm.frontend.exchange import Exchange

logger = logging.getLogger("zlm.frontend.access")

QUIET = {"/health", "/health/live", "/health/ready", "/ping", "/version", "/metrics", "/docs",
    "/openapi.json", "/load", "/is_sleeping", "/server_info",
    "/", "/ui/", "/ui/events"}  # fmt: skip

Fields = dict[str, str | int | float | bool]


def log(exchange: Exchange) -> None:
    """Log *exchange*, which is over."""
    level = logging.DEBUG if exchange.route in QUIET else logging.INFO
    if logger.isEnabledFor(level):
        facts = fields(exchange, time.monotonic())
        logger.log(level, "%s", line(facts), extra={"fields": facts})


def fields(exchange: Exchange, now: float) -> Fields:
    """Return the facts of *exchange*, which ended at *now*; seconds are rounded to 0.1 ms."""
    request, record = exchange.request, exchange.record
    facts: Fields = {
        "method": request.method or "-",
        "path": clip(request.target.partition("?")[0]),
        "status": exchange.status,
        "seconds": round(now - exchange.received, 4),
    }
    if exchange.num_prompt_tokens or record.num_sequences:
        facts["prompt_tokens"] = exchange.num_prompt_tokens
        facts["cached_tokens"] = record.num_cached_tokens
        facts["output_tokens"] = exchange.num_output_tokens
    if record.num_sequences > 1:
        facts["sequences"] = record.num_sequences
    if record.stream:
        facts["stream"] = True
    if record.finish_reason:
        facts["finish_reason"] = record.finish_reason
    if record.first_token_at:
        facts["queue_seconds"] = round(record.started_at - exchange.received, 4)
        facts["prefill_seconds"] = round(record.first_token_at - record.started_at, 4)
        facts["decode_seconds"] = round(now - record.first_token_at, 4)
    if record.rejection:
        facts["rejected"] = record.rejection
    if record.failure:
        facts["failure"] = record.failure
    if exchange.fault:
        facts["fault"] = exchange.fault
    if exchange.client_gone:
        facts["client_gone"] = True
    if request.key is not None and request.key.name:
        facts["key"] = request.key.name
    facts["request_id"] = exchange.request_id or "-"
    return facts


_TEXT = {  # field → how the line tells it
    "prompt_tokens": " prompt={}",
    "cached_tokens": " cached={}",
    "output_tokens": " output={}",
    "sequences": " sequences={}",
    "stream": " stream",
    "finish_reason": " finish={}",
    "queue_seconds": " queue={:.3f}s",
    "prefill_seconds": " prefill={:.3f}s",
    "decode_seconds": " decode={:.3f}s",
    "rejected": " rejected={}",
    "client_gone": " client gone",
    "key": " key={}",
    "request_id": " id={}",
    "failure": " failed: {}",
    "fault": " cut off: {}",
}


def line(facts: Fields) -> str:
    """Return *facts* as a line of text."""
    head = f"{facts['method']} {facts['path']} {facts['status']} {facts['seconds']:.3f}s"
    return head + "".join(form.format(facts[n]) for n, form in _TEXT.items() if n in facts)
