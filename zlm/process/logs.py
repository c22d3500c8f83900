"""Log lines: ``time level process message`` on stderr, one line each, in every process alike.

Control characters inside a message are escaped, so that data from a client can neither break a
line nor forge one; each line of a traceback gets the same prefix. ``ZLM_LOG`` sets the level:
debug, info (the default), warning or error.
"""

import logging
import os
import re
import sys

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


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


def escape(text: str) -> str:
    """Return *text* with control characters and lone surrogates written as escapes."""
    text = CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def start_logging(process: str) -> None:
    """Send the log of this process to stderr; *process* is its name in each line."""
    wanted = os.environ.get("ZLM_LOG", "info").strip().lower()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    logging.basicConfig(level=LEVELS.get(wanted, logging.INFO), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for chatty in ("asyncio", "httpx", "httpcore", "urllib3", "filelock", "fsspec"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if wanted not in LEVELS:
        known = ", ".join(LEVELS)
        logging.getLogger(__name__).warning("ZLM_LOG=%s is none of %s", wanted, known)
