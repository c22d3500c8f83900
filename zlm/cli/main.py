"""The ``zlm`` command: finds the command that is asked for and hands its arguments over.

Imports a command's module only when that command is run, so that ``zlm --help`` and
``zlm --version`` answer at once, on machines without a GPU too.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from zlm import __version__

COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's API",
    "chat": "talk with a model in the terminal",
    "complete": "have a model go on with a text",
    "run": "answer a file of requests, offline",
    "pull": "fetch a model from the hub",
    "plan": "tell whether a model fits a GPU, without one",
    "doctor": "look at this machine: what is wrong, and what to do",
    "bench": "measure a server under load, the offline engine, a start, a step",
    "completion": "print what makes a shell complete commands and flags",
}
FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130
CLOSED_PIPE = 141  # as the shell tells a death by SIGPIPE


def main(words: Sequence[str] | None = None) -> int:
    """Run ``zlm`` with arguments *words* (default: the process's); return the exit status."""
    _open_streams()
    try:
        try:
            return _run(sys.argv[1:] if words is None else words)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # while it was starting; the commands take care of it afterwards
        return INTERRUPTED
    except BrokenPipeError:  # who read the output has enough of it
        _drop_output()
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        where = f" {error.filename}" if error.filename else ""
        print(f"zlm: cannot write{where}: {error.strerror}", file=sys.stderr)
        return FAILED


def _open_streams() -> None:
    """See that what is closed of the standard streams is open, to nowhere.

    Else the next file or socket would be given its number, and be taken for it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # What is opened takes the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _drop_output() -> None:
    """Send what is still to be printed nowhere: it would fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: Sequence[str]) -> int:
    first = words[0] if words else ""
    if first in ("-h", "--help", "help"):
        print(overview())
        return 0
    if first in ("-v", "-V", "--version", "version"):
        print(f"zlm {__version__}")
        return 0
    if first not in COMMANDS:
        print(_complaint(first), file=sys.stderr)
        return USAGE_ERROR
    command = importlib.import_module(f"zlm.cli.{first}")
    status: int = command.main(list(words[1:]))
    return status


def overview() -> str:
    """Return what ``zlm --help`` prints."""
    lines = ["usage: zlm COMMAND [arguments]", "", "Serves large language models.", "", "Commands:"]
    lines += [f"  {name:12}{what}" for name, what in COMMANDS.items()]
    lines += ["", "zlm COMMAND --help tells more; zlm --version prints the version."]
    return "\n".join(lines)


def _complaint(word: str) -> str:
    if not word:
        return overview()
    near = get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is: {', '.join(COMMANDS)}"
    return f"zlm: no command {word[:200]!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
