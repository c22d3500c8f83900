"""The flags of serve that say what is told of the work: logs and traces."""

import importlib.util
from urllib.parse import urlsplit

from zlm.cli import values
from zlm.cli.argument import Argument

TRACE_PACKAGE = "opentelemetry.exporter.otlp.proto.http"


def traces_endpoint(value: str) -> str:
    """Return the URL of an OTLP/HTTP collector; raise ValueError if nothing could be sent to it."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL such as http://localhost:4318/v1/traces")
    try:
        found = importlib.util.find_spec(TRACE_PACKAGE) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ValueError("needs OpenTelemetry's packages: pip install 'zlm[otel]'")
    return value


LOGS = (
    Argument(
        flag="--enable-log-requests",
        field="server.log_requests",
        off=("--disable-log-requests",),
        help="log a line for each request",
    ),
    Argument(
        flag="--enable-log-stats",
        field="log.stats",
        off=("--disable-log-stats",),
        help="log every 10 s of work how much runs and waits, and the tokens a second",
    ),
    Argument(
        flag="--log-format",
        field="log.format",
        metavar="FORMAT",
        parse=values.choice("text", "json"),
        help="text, or json: a line is one object, that of a request has all its facts as fields",
    ),
    Argument(
        flag="--otlp-traces-endpoint",
        field="log.traces_endpoint",
        metavar="URL",
        parse=traces_endpoint,
        help="send a span a request to this OTLP/HTTP collector",
        default="off",
    ),
)
