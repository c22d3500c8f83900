"""The help text of serve, made from the table of flags and the defaults in ``zlm.config``."""

import textwrap

from zlm.cli.accepted import ACCEPTED, Accepted
from zlm.cli.argument import Argument
from zlm.cli.arguments import GROUPS
from zlm.cli.parse import CONFIG_FLAG
from zlm.config import Config, ModelOptions

WIDTH = 100
COLUMN = 36  # where descriptions start

INTRODUCTION = """\
usage: zlm serve MODEL [flags]

Serves MODEL over HTTP with OpenAI's API. MODEL is a folder with safetensors files, a GGUF file, or
a Hugging Face id. A flag may be written --flag VALUE or --flag=VALUE, with - or _ inside; a switch
--x is turned off by --no-x. ZLM_LOG=debug, info, warning or error sets what is logged.
"""


def serve_help() -> str:
    """Return what ``zlm serve --help`` prints."""
    lines = INTRODUCTION.splitlines()
    for title, rows in GROUPS.items():
        lines += ["", f"{title}:"]
        for row in rows:
            lines += _entry(_usage(row), f"{row.help} (default: {default(row)})")
    lines += ["", "Accepted from guides for vLLM:"]
    for accepted in ACCEPTED:
        lines += _entry(_usage(accepted), accepted.help)
    lines += ["", "Other:"]
    lines += _entry(_usage(CONFIG_FLAG), CONFIG_FLAG.help)
    lines += _entry("--model MODEL", "another way to give the model")
    lines += _entry("-h, --help", "print this text")
    return "\n".join(lines)


def default(row: Argument) -> str:
    """Return the default of a flag as help shows it."""
    if row.default:
        return row.default
    value = row.value_in(Config(model=ModelOptions(model="")))
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, int) and value >= 1024 and row.metavar == "SIZE":
        if value >= 1024**3:
            return f"{value // 1024**3} GiB"
        return f"{value // 1024**2} MiB" if value >= 1024**2 else f"{value // 1024} KiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _usage(row: Argument | Accepted) -> str:
    names = ", ".join((*row.spellings, row.flag))
    if row.metavar:
        return f"{names} {row.metavar}"
    return f"--[no-]{row.flag.removeprefix('--')}"


def _entry(usage: str, description: str) -> list[str]:
    wrapped = textwrap.wrap(description, WIDTH - COLUMN)
    first = f"  {usage}"
    lines = []
    if len(first) >= COLUMN:
        lines.append(first)
        first = ""
    for line in wrapped:
        lines.append(first.ljust(COLUMN) + line)
        first = ""
    return lines
