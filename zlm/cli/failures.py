"""What a command says when it fails, and its exit status: one way for all that are not servers."""

import sys
from collections.abc import Callable

from zlm.errors import ConfigError, ZlmError
from zlm.process.logs import escape

USAGE_ERROR, FAILED, INTERRUPTED = 2, 1, 130


def told(command: str, work: Callable[[], int], *, interrupted: str = "") -> int:
    """Do *work* and return its exit status; what goes wrong is one line on stderr.

    interrupted: what is said after Ctrl-C; empty: nothing.
    """
    try:
        return work()
    except ZlmError as error:
        print(f"zlm {command}: {escape(error.message)}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        if interrupted:
            print(f"zlm {command}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
