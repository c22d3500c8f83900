"""Log lines on stderr, one a record, in every process alike: as text, or as JSON for machines.

    2026-11-29 22:41:07.123 INFO    frontend POST /v1/completions 200 0.310s prompt=5 output=16
    {"time": "2026-11-29T22:41:07.123Z", "level": "info", "process": "frontend", "logger": ...

Control characters inside a message are escaped, so that data from a client can neither break a
line nor forge one; each line of a traceback gets the same prefix. As JSON, a record is one object:
its message, and the ``fields`` that it may carry beside it, each under its own name. ``ZLM_LOG``
sets the level: debug, info (the default), warning or error. The supervisor passes the format on to
its children in the environment, since they log before they know their configuration.
"""

import json
import logging
import os
import re
import sys
import time
from typing import TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
FORMAT = "ZLM_LOG_FORMAT"  # environment of child processes: text or json
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

logger = logging.getLogger(__name__)


class LineFormatter(logging.Formatter):
    """Formats a record as prefixed lines: one for the message, one for each traceback line."""

    default_msec_format = "%s.%03d"

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{self.formatTime(record)} {record.levelname:7} {self._process}"
        lines = [escape(record.getMessage())]
        if record.exc_info:
            lines += map(escape, self.formatException(record.exc_info).splitlines())
        return "\n".join(f"{prefix} {line}" for line in lines)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, all ASCII. Times are UTC."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in getattr(record, "fields", {}).items():
            facts.setdefault(name, value)
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines whole and at once. What a full disk took is told when there is room again.

    The line after one that failed begins with a line feed, for that one may have been cut.
    """

    _cut = ""  # a line feed, if the last line may lack its own
    _num_lost = 0
    _why: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self._cut}{self.format(record)}\n".encode()
            self._cut = "\n"
            while line:
                line = line[os.write(self.stream.fileno(), line) :]
        except OSError as error:
            self._num_lost, self._why = self._num_lost + 1, error.strerror
        except Exception:
            self.handleError(record)
        else:
            self._cut = ""
            if self._num_lost:
                lost, self._num_lost = self._num_lost, 0
                logger.warning("lines of this log that were lost before: %d (%s)", lost, self._why)


def escape(text: str) -> str:
    """Return *text* with control characters and lone surrogates written as escapes."""
    text = CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def start_logging(process: str, form: str | None = None) -> None:
    """Send the log of this process to stderr; *process* is its name in each line.

    *form* is text or json, for the children that this process starts, too; None: as its parent's.
    """
    wanted = os.environ.get("ZLM_LOG", "info").strip().lower()
    if form is not None:
        os.environ[FORMAT] = form
    as_json = os.environ.get(FORMAT) == "json"
    handler = LineHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else LineFormatter(process))
    logging.basicConfig(level=LEVELS.get(wanted, logging.INFO), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for chatty in ("asyncio", "httpx", "httpcore", "urllib3", "filelock", "fsspec"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if wanted not in LEVELS:
        known = ", ".join(LEVELS)
        logger.warning("ZLM_LOG=%s is none of %s", wanted, known)
