"""From the text of a flag's value to the value: numbers, sizes, choices, lists.

Each function takes the text and returns the value, or raises ValueError with what is wanted, to be
put after the flag's name ("must be a whole number"). Ranges of what a ``Config`` holds are the
business of ``zlm.config``.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zlm.errors import clip

T = TypeVar("T")
N = TypeVar("N", int, float)

QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")
VLLM_BACKENDS = {"TRITON_ATTN": "triton", "TRITON_ATTN_VLLM_V1": "triton", "TORCH_SDPA": "sdpa"}
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def text(value: str) -> str:
    """Return *value* as it is, if it is not empty."""
    if not value:
        raise ValueError("must not be empty")
    return value


def path(value: str) -> str:
    """Return *value* as an absolute path, which is the same for every process."""
    return str(Path(text(value)).absolute())


def file(value: str) -> str:
    """Return the absolute path of a file that can be read."""
    try:
        with Path(text(value)).open("rb"):
            return path(value)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def names(value: str) -> list[str]:
    """Return the names in *value*: one quoted list is as good as several words."""
    return text(value.strip()).split()


def integer(value: str) -> int:
    """Return a whole number; underscores may group its digits."""
    try:
        return int(value)
    except ValueError:
        raise ValueError("must be a whole number") from None


def number(value: str) -> float:
    """Return a finite number."""
    try:
        result = float(value)
    except ValueError:
        raise ValueError("must be a number") from None
    if not abs(result) < float("inf"):
        raise ValueError("must be a finite number")
    return result


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return *parse* such that argparse tells what is wanted."""

    def take(value: str) -> T:
        try:
            return parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, got {clip(value)!r}") from None

    return take


def ranged(parse: Callable[[str], N], least: float, most: float = math.inf) -> Callable[[str], N]:
    """Return, for argparse, what takes numbers that *parse* takes, from *least* to *most*."""
    bounds = f"at least {least}" if most == math.inf else f"between {least} and {most}"

    def take(value: str) -> N:
        result = parse(value)
        if not least <= result <= most:
            raise ValueError(f"must be {bounds}")
        return result

    return typed(take)


max_tokens = ranged(integer, 1)  # of an answer
temperature = ranged(number, 0, 2)


def switch(value: str) -> bool:
    """Return what ``--flag=value`` and a config file say for a flag that is on or off."""
    known = {"true": True, "yes": True, "on": True, "1": True}
    known |= {"false": False, "no": False, "off": False, "0": False}
    try:
        return known[value.lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


@dataclass(frozen=True, slots=True)
class Choice:
    """Takes one of ``known``; ``spellings`` maps other words to them."""

    known: tuple[str, ...]
    spellings: Mapping[str, str]

    def __call__(self, value: str) -> str:
        value = self.spellings.get(value, value)
        if value not in self.known:
            raise ValueError(f"must be one of {', '.join(self.known)}")
        return value


def choice(*known: str, spellings: Mapping[str, str] | None = None) -> Choice:
    """Return what takes one of *known*; *spellings* maps other words to them."""
    return Choice(known, spellings or {})


def attention_backend(value: str) -> str:
    """Return the name of a backend, from vLLM's name too where both have it."""
    known = ("auto", "triton", "sdpa")
    name = VLLM_BACKENDS.get(value.upper(), value.lower())
    if name in known:
        return name
    why = ""
    if value.isupper() or value.upper().startswith(("FLASH", "XFORMERS", "FLEX")):
        why = ": zlm has attention kernels of its own and no backends of vLLM"
    raise ValueError(f"must be one of {', '.join(known)}{why}")


def quantity(value: str) -> int:
    """Return a count: 8192, 8k or 8.5k (thousands), 8K or 8Ki (1024s); likewise m, g and t."""
    return _scaled(value, "must be a whole number, or one with k (1000) or K (1024), m or M, ...")


def size_bytes(value: str) -> int:
    """Return a number of bytes: 1073741824, 8GB (10^9s), 8GiB or 8G (2^30s), 512MiB, ..."""
    return _scaled(value, "must be a number of bytes such as 1073741824, 8GB or 512MiB")


def _scaled(value: str, wanted: str) -> int:
    match = QUANTITY.fullmatch(value.strip())
    if match is None:
        raise ValueError(wanted)
    digits, unit = match.groups()
    # Decimal with a lone small letter or with B (GB), binary with a lone capital or with i (GiB).
    prefix = re.sub(r"i?b$", "", unit, flags=re.IGNORECASE).removesuffix("i")
    is_binary = "i" in unit or (len(unit) == 1 and unit.isupper() and unit != "B")
    if prefix.lower() not in POWERS or (unit.lower() == "ib"):
        raise ValueError(wanted)
    scale = (1024 if is_binary else 1000) ** POWERS[prefix.lower()]
    whole, _, fraction = digits.partition(".")
    scaled_fraction = int(fraction or "0") * scale
    if scaled_fraction % 10 ** len(fraction):
        raise ValueError(wanted)
    return int(whole) * scale + scaled_fraction // 10 ** len(fraction)


def max_model_len(value: str) -> int | str:
    """Return a number of tokens, or ``auto``, for which vLLM has -1 too."""
    return "auto" if value in ("auto", "-1") else quantity(value)


def chat_template(value: str) -> str:
    """Return a template or the path of a file that holds one."""
    if "{" not in value and not Path(value).is_file():
        raise ValueError("must be a template or the path of a file that holds one")
    return value


def strings(value: str) -> list[str]:
    """Return one string, or several given as a JSON list."""
    if not value.startswith("["):
        return [text(value)]
    try:
        items = json.loads(value)
    except json.JSONDecodeError:
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("must be a string or a JSON list of strings")
    return items
