"""Flags that set no field of ``Config``: taken so that unit files and guides written for vLLM work.

Each row's ``take`` gets the value and returns a line for the log that says what became of it, or
raises ValueError with why it cannot be. No flag is ignored without a word.
"""

from collections.abc import Callable
from dataclasses import dataclass

from zlm.cli import values


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A flag that changes nothing here, or only one value of which is possible."""

    flag: str
    help: str
    take: Callable[[str], str]
    metavar: str = ""  # empty: a switch; ``take`` gets "true" or "false"
    spellings: tuple[str, ...] = ()


def _swap_space(value: str) -> str:
    values.number(value)
    return (
        "preempted requests are computed again rather than swapped out, so no memory is set aside"
    )


def _trust_remote_code(value: str) -> str:
    if not values.switch(value):
        return "a model's own code is never run"
    return "a model's own code is never run; a model that needs it is refused"


def _tools_when_none(value: str) -> str:
    if not values.switch(value):
        raise ValueError("cannot be off: with tool_choice none, tools are left out of the prompt")
    return "with tool_choice none, tools are left out of the prompt"


def _ssl_refresh(value: str) -> str:
    if not values.switch(value):
        raise ValueError("cannot be off: certificates are read again when their files have changed")
    return "certificates are always read again when their files have changed"


ACCEPTED = (
    Accepted(
        flag="--enable-auto-tool-choice",
        take=lambda value: "requests may always bring tools",
        help="always on: a request that brings tools may get calls",
    ),
    Accepted(
        flag="--exclude-tools-when-tool-choice-none",
        take=_tools_when_none,
        help="always on",
    ),
    Accepted(
        flag="--enable-reasoning",
        take=lambda value: "thoughts are always told apart from the content",
        help="always on for models that think",
    ),
    Accepted(
        flag="--enable-sleep-mode",
        take=lambda value: "an administrator may always put the server to sleep: POST /sleep",
        help="always on, for administrators",
    ),
    Accepted(
        flag="--enable-ssl-refresh",
        take=_ssl_refresh,
        help="always on: certificates are read again when their files have changed",
    ),
    Accepted(
        flag="--swap-space",
        metavar="GIB",
        take=_swap_space,
        help="nothing is swapped: preempted requests are computed again",
    ),
    Accepted(
        flag="--trust-remote-code",
        take=_trust_remote_code,
        help="a model's own code is never run; models that need none are served",
    ),
)
