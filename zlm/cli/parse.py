"""From words of the command line, a config file and the environment to a ``Config``.

The command line wins over the file. What is wrong is a ``ConfigError`` that names the flag and what
is wanted; an unknown flag is told with the nearest known one, and a flag of vLLM that zlm lacks
with the reason. Owns no state; reads only the files that flags name.
"""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zlm.api_keys import api_key
from zlm.cli.accepted import ACCEPTED, Accepted
from zlm.cli.argument import Argument
from zlm.cli.arguments import ARGUMENTS
from zlm.config import (
    CacheOptions,
    ComputeOptions,
    Config,
    LogOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerLimits,
    ServerOptions,
    check,
)
from zlm.errors import ConfigError, clip
from zlm.sampling_params import SamplingLimits
from zlm.unsupported import UNSUPPORTED

MODEL_FLAG = Argument(
    flag="--model", field="model.model", metavar="MODEL", parse=str, help="the model"
)
CONFIG_FLAG = Accepted(
    flag="--config",
    metavar="FILE",
    take=str,
    help="a YAML file of flags without their dashes; the command line wins over it",
)
SECRET_FLAGS = ("--api-key", "--admin-api-key")
KEY_VARIABLES = {  # of the environment → field of Config
    "ZLM_API_KEY": "server.api_keys",
    "ZLM_ADMIN_API_KEY": "server.admin_api_keys",
}

Row = Argument | Accepted


@dataclass(slots=True)
class Given:
    """What one source (command line or file) says."""

    values: dict[str, Any] = field(default_factory=dict)  # by field of Config
    notes: dict[str, str] = field(default_factory=dict)  # by flag: a line for the log
    file: str = ""  # --config


def _spellings() -> dict[str, tuple[Row, bool]]:
    """Return every spelling of every flag, with its row and whether it switches on."""
    table: dict[str, tuple[Row, bool]] = {}
    rows: tuple[Row, ...] = (*ARGUMENTS, *ACCEPTED, MODEL_FLAG, CONFIG_FLAG)
    for row in rows:
        for name in (row.flag, *row.spellings):
            table[name] = (row, True)
        if not row.metavar:
            off = row.off if isinstance(row, Argument) else ()
            for name in ("--no-" + row.flag.removeprefix("--"), *off):
                table[name] = (row, False)
    return table


SPELLINGS = _spellings()


def parse(
    words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[Config, list[str]]:
    """Return the options that *words* give, and lines for the log about flags that change nothing.

    Raises ConfigError.
    """
    given = _read_words(words)
    if given.file:
        base = _read_file(given.file)
        given = Given(base.values | given.values, base.notes | given.notes)
    for name, path in KEY_VARIABLES.items():
        keys = given.values.get(path, ())
        if environment.get(name):
            admin = path == "server.admin_api_keys"
            keys = (*keys, api_key(environment[name], admin=admin, flag=f"${name}"))
        given.values[path] = tuple({key.sha256: key for key in keys}.values())
    config = _build(given.values)
    check(config)
    notes = [f"{flag}: {note}" for flag, note in given.notes.items()]
    return config, notes


def parse_known(parser: ArgumentParser, words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return what *words* say to *parser*, and the rest: flags of ``zlm serve`` and their values.

    A flag that neither has ends the program as a fault of *parser*'s does, with the nearest.
    """
    options, rest = parser.parse_known_args(list(words))
    own = parser._option_string_actions
    for word in rest[: rest.index("--") if "--" in rest else None]:
        if _is_flag(word):
            try:
                _look_up(_normal(word.partition("=")[0]), own)
            except ConfigError as error:
                parser.error(error.message)
    return options, rest


# ------------------------------------------------------------------------------ the command line


def _read_words(words: Sequence[str]) -> Given:
    given = Given()
    positional: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            positional += words[at:]
            break
        if not _is_flag(word):
            positional.append(word)
            continue
        flag, has_value, value = word.partition("=")
        flag = _normal(flag)
        row, is_on = _look_up(flag)
        values = [value] if has_value else []
        if not row.metavar:
            values = values or ["true"]
        elif not has_value:
            most = len(words) if isinstance(row, Argument) and row.takes == "words" else 1
            while at < len(words) and len(values) < most and not _is_flag(words[at]):
                values.append(words[at])
                at += 1
        _set(given, row, flag, values, is_on)
    _set_model(given, positional)
    return given


def _set_model(given: Given, positional: list[str]) -> None:
    if len(positional) > 1:
        raise ConfigError(f"unexpected {clip(positional[1])!r} after the model {positional[0]!r}")
    if positional:
        named = given.values.setdefault("model.model", positional[0])
        if named != positional[0]:
            raise ConfigError(f"two models are given: {positional[0]} and --model {named}")


def _is_flag(word: str) -> bool:
    """Whether *word* is a flag and not a value; -1 and -0.5 are values."""
    if len(word) < 2 or word[0] != "-":
        return False
    return not (word[1].isdigit() or word[1] == ".")


def _normal(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _look_up(flag: str, more: Collection[str] = ()) -> tuple[Row, bool]:
    """Return the row of *flag* and whether it switches on; *more*: flags that are known besides."""
    if flag in SPELLINGS:
        return SPELLINGS[flag]
    positive = "--" + flag.removeprefix("--no-")
    for name in (flag, positive):
        if name in UNSUPPORTED:
            raise ConfigError(
                f"{flag} is a flag of vLLM that zlm does not have: {UNSUPPORTED[name]}"
            )
    raise ConfigError(f"unknown flag {clip(flag)}{nearest(flag, [*more, *SPELLINGS])}")


def nearest(word: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return ``; did you mean ...?`` with the word of *known* that is nearest to *word*, or ""."""
    from difflib import get_close_matches  # only wanted when something is wrong

    found = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def _set(given: Given, row: Row, flag: str, words: list[str], is_on: bool) -> None:
    """Put the value that *words* give *row* in its place; *flag* is the spelling that was used."""
    if not words:
        raise ConfigError(f"{flag} needs a value: {flag} {row.metavar}")
    takes = row.takes if isinstance(row, Argument) else "one"
    if takes == "one" and len(words) > 1:
        raise ConfigError(f"{flag} takes one value, got {len(words)}")
    if row is CONFIG_FLAG:
        given.file = words[-1]
    elif isinstance(row, Accepted):
        said = words[-1] if is_on else "false"
        given.notes[row.flag] = _read(flag, said, row.take)
    elif row.is_switch:
        given.values[row.field] = _read(flag, words[-1], row.parse) == is_on
    elif takes == "one":
        given.values[row.field] = _read(flag, words[-1], row.parse)
    else:
        before = given.values.get(row.field, ())
        given.values[row.field] = (*before, *_read_all(flag, words, row.parse))


def _read_all(flag: str, words: list[str], parse: Callable[[str], Any]) -> list[Any]:
    items: list[Any] = []
    for word in words:
        item = _read(flag, word, parse)
        items += item if isinstance(item, list) else [item]
    return items


def _read(flag: str, word: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(word)
    except ConfigError:
        raise
    except ValueError as error:
        shown = "" if flag in SECRET_FLAGS else f", got {clip(word)!r}"
        raise ConfigError(f"{flag} {error}{shown}") from None


# -------------------------------------------------------------------------------------- files


def _read_file(path: str) -> Given:
    """Return what a YAML file of flags says."""
    import yaml  # 15 ms, only when there is such a file

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {_yaml_problem(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must be a mapping of flags to values")
    given = Given()
    for key, value in content.items():
        flag = _normal(f"--{key}")
        try:
            row, is_on = _look_up(flag)
            if row is CONFIG_FLAG:
                raise ConfigError("--config cannot be given in a file")
            _set(given, row, flag, _yaml_words(flag, value), is_on)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from error
    return given


def _yaml_problem(error: Exception) -> str:
    """Return what is wrong with a YAML file, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', error)}"


def _yaml_words(flag: str, value: Any) -> list[str]:
    """Return a YAML value as the words that the command line would have."""
    if isinstance(value, list):
        return [word for item in value for word in _yaml_words(flag, item)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, str | int | float):
        return [str(value)]
    raise ConfigError(f"{flag} must be a string, a number, true, false or a list")


def _build(values: Mapping[str, Any]) -> Config:
    """Return the Config whose fields *values* names by dotted path."""
    parts: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        struct, _, name = path.rpartition(".")
        parts.setdefault(struct, {})[name] = value
    if "model" not in parts.get("model", {}):
        raise ConfigError("no model is given: zlm serve MODEL, with MODEL before all flags")
    sampling = SamplingLimits(**parts.get("server.limits.sampling", {}))
    limits = ServerLimits(sampling=sampling, **parts.get("server.limits", {}))
    return Config(
        model=ModelOptions(**parts["model"]),
        cache=CacheOptions(**parts.get("cache", {})),
        scheduler=SchedulerOptions(**parts.get("scheduler", {})),
        parallel=ParallelOptions(**parts.get("parallel", {})),
        compute=ComputeOptions(**parts.get("compute", {})),
        server=ServerOptions(limits=limits, **parts.get("server", {})),
        log=LogOptions(**parts.get("log", {})),
    )
