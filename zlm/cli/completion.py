"""``zlm completion bash|zsh|fish``: a script that makes a shell complete commands and flags.

    eval "$(zlm completion bash)"          in ~/.bashrc; zsh likewise, in ~/.zshrc
    zlm completion fish > ~/.config/fish/completions/zlm.fish

The flags of ``zlm serve``, and what values they take, come from the table that the parser is made
from; those of the other commands from what their ``--help`` says. The script is whole: it does not
run zlm at each press of a key.
"""

import contextlib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zlm.cli.accepted import ACCEPTED, Accepted
from zlm.cli.argument import Argument
from zlm.cli.arguments import ARGUMENTS
from zlm.cli.bench import MEASUREMENTS
from zlm.cli.parse import CONFIG_FLAG, MODEL_FLAG
from zlm.cli.values import Choice

USAGE_ERROR = 2
FILES = {
    "FILE",
    "FOLDER",
    "PATH",
    "PATH|ID",
    "OUTPUT",
}  # metavars of what is completed by the shell
TAKES_SERVE_FLAGS = re.compile(r"flags\s+of\s+zlm\s+serve")
FLAG_LINE = re.compile(r"^ {2,6}(-\S.*?)(?: {2,}(.*))?$")  # its spellings, what is told of it
SPELLING = re.compile(r"(--[a-z][a-z0-9-]*)(?: (.+?))?(?=, -|$)")  # name, metavar


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as a shell sees it. ``values``: those it may have, if they are few."""

    name: str
    help: str = ""
    takes_value: bool = True
    values: tuple[str, ...] = ()
    is_file: bool = False


Commands = Mapping[str, Sequence[Flag]]  # "chat", or "bench serve", to its flags


def main(words: Sequence[str]) -> int:
    """Run ``zlm completion`` with its arguments *words*; print the script, return the status."""
    shells = {"bash": bash, "zsh": zsh, "fish": fish}
    if len(words) == 1 and words[0] in ("-h", "--help"):
        print(f"usage: zlm completion {{{','.join(shells)}}}\n\n{(__doc__ or '').strip()}")
        return 0
    if len(words) != 1 or words[0] not in shells:
        print(f"zlm completion: give one of {', '.join(shells)}", file=sys.stderr)
        return USAGE_ERROR
    print(shells[words[0]](commands()))
    return 0


def serve_flags() -> list[Flag]:
    """Return the flags of ``zlm serve``, from its table."""
    rows: tuple[Argument | Accepted, ...] = (*ARGUMENTS, *ACCEPTED, MODEL_FLAG, CONFIG_FLAG)
    flags = []
    for row in rows:
        parse = row.parse if isinstance(row, Argument) else None
        values = parse.known if isinstance(parse, Choice) else ()
        flags.append(Flag(row.flag, row.help, bool(row.metavar), values, row.metavar in FILES))
        if not row.metavar:
            flags.append(Flag(f"--no-{row.flag[2:]}", row.help, False))
    return flags


def commands() -> dict[str, list[Flag]]:
    """Return every command with its flags, those of ``zlm serve`` too where it takes them."""
    from zlm.cli.main import COMMANDS

    of_serve = serve_flags()
    found: dict[str, list[Flag]] = {}
    for name in COMMANDS:
        if name in ("serve", "completion"):
            found[name] = [*of_serve, Flag("--help", takes_value=False)] if name == "serve" else []
            continue
        for words in [[name, each] for each in MEASUREMENTS] if name == "bench" else [[name]]:
            text = _help(words)
            flags = flags_in(text)
            known = {flag.name for flag in flags}
            if TAKES_SERVE_FLAGS.search(text):
                flags += [flag for flag in of_serve if flag.name not in known]
            found[" ".join(words)] = flags
    return found


def _help(words: list[str]) -> str:
    module = importlib.import_module(f"zlm.cli.{words[0]}")
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        module.main([*words[1:], "--help"])
    return said.getvalue()


def flags_in(text: str) -> list[Flag]:
    """Return the flags that a help text of argparse's tells of."""
    flags = []
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        match = FLAG_LINE.match(line)
        if match is None:
            continue
        told = match[2] or (following.strip() if following.startswith(" " * 10) else "")
        for name, metavar in SPELLING.findall(match[1]):
            values = tuple(metavar[1:-1].split(",")) if metavar.startswith("{") else ()
            is_file = metavar.partition(".")[0] in FILES
            flags.append(Flag(name, told, bool(metavar), values, is_file))
    return flags


# -------------------------------------------------------------------------------------- the shells


def bash(commands: Commands) -> str:
    """Return the script for bash."""
    first = " ".join(dict.fromkeys(name.split()[0] for name in commands))
    lines = [
        "_zlm() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} words=",
        "    local previous=${COMP_WORDS[COMP_CWORD-1]} second=2",
        "    COMPREPLY=()",
        '    [ "$command" = bench ] && { command="bench ${COMP_WORDS[2]}"; second=3; }',
        f'    if [ "$COMP_CWORD" -eq 1 ]; then words="{first}"',
        '    elif [ "$COMP_CWORD" -lt "$second" ]; then',
        f'        words="{" ".join(MEASUREMENTS)}"',
        '    elif [ "$command" = completion ]; then words="bash zsh fish"',
        "    else",
        '        case "$command $previous" in',
    ]
    for key, values in _values(commands).items():
        lines.append(f'            {_pattern(key)}) words="{" ".join(values)}" ;;')
    takers = "|".join(_pattern(key) for key in _takers(commands))
    lines += [
        f"            {takers}) return ;;" if takers else "",
        "            *)",
        "                [[ $word == -* ]] || return",
        '                case "$command" in',
    ]
    for name, flags in commands.items():
        lines.append(f'                    "{name}") words="{" ".join(f.name for f in flags)}" ;;')
    lines += [
        "                esac ;;",
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _zlm zlm",
    ]
    return "\n".join(line for line in lines if line)


def _values(commands: Commands) -> dict[str, tuple[str, ...]]:
    """Return what a flag may be followed by, under ``command flag``."""
    return {
        f"{name} {flag.name}": flag.values
        for name, flags in commands.items()
        for flag in flags
        if flag.values
    }


def _takers(commands: Commands) -> list[str]:
    """Return the flags, as ``command flag``, that any word may follow: files are offered then."""
    return [
        f"{name} {flag.name}"
        for name, flags in commands.items()
        for flag in flags
        if flag.takes_value and not flag.values
    ]


def _pattern(key: str) -> str:
    return f'"{key}"'


def zsh(commands: Commands) -> str:
    """Return the script for zsh."""
    from zlm.cli.main import COMMANDS

    lines = [
        "#compdef zlm",
        "_zlm() {",
        "    local command=$words[2] previous=$words[CURRENT-1] second=3",
        "    local -a found",
        '    [[ $command == bench ]] && { command="bench $words[3]"; second=4 }',
        "    if (( CURRENT == 2 )); then",
        f"        found=({_described(COMMANDS)})",
        "        _describe command found",
        "        return",
        "    elif (( CURRENT < second )); then",
        f"        found=({_described(MEASUREMENTS)})",
        "        _describe measurement found",
        "        return",
        "    elif [[ $command == completion ]]; then compadd bash zsh fish; return",
        "    fi",
        '    case "$command $previous" in',
    ]
    for key, values in _values(commands).items():
        lines.append(f"        {_pattern(key)}) compadd {' '.join(values)}; return ;;")
    takers = "|".join(_pattern(key) for key in _takers(commands))
    lines += [
        f"        {takers}) _files; return ;;" if takers else "",
        "    esac",
        "    if [[ $words[CURRENT] != -* ]]; then _files; return; fi",
        '    case "$command" in',
    ]
    for name, flags in commands.items():
        told = _described({flag.name: flag.help for flag in flags})
        lines.append(f"        {_pattern(name)}) found=({told}) ;;")
    lines += [
        "    esac",
        "    _describe -o flag found",
        "}",
        'if [[ $funcstack[1] == _zlm ]]; then _zlm "$@"; else compdef _zlm zlm; fi',
    ]
    return "\n".join(line for line in lines if line)


def _described(words: Mapping[str, str]) -> str:
    entries = [f"{word}:{told.replace(':', ' ')}" if told else word for word, told in words.items()]
    return " ".join(map(shlex.quote, entries))


def fish(commands: Commands) -> str:
    """Return the script for fish."""
    from zlm.cli.main import COMMANDS

    lines = []
    for name, told in COMMANDS.items():
        lines.append(f"complete -c zlm -n __fish_use_subcommand -a {name} -d {shlex.quote(told)}")
    for name, told in MEASUREMENTS.items():
        condition = "__fish_seen_subcommand_from bench; and test (count (commandline -opc)) -eq 2"
        lines.append(f"complete -c zlm -n '{condition}' -f -a {name} -d {shlex.quote(told)}")
    shells = "__fish_seen_subcommand_from completion"
    lines.append(f"complete -c zlm -n '{shells}' -f -a 'bash zsh fish'")
    for name, flags in commands.items():
        condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for flag in flags:
            line = f"complete -c zlm -n '{condition}' -l {flag.name[2:]}"
            if flag.help:
                line += f" -d {shlex.quote(flag.help)}"
            if flag.values:
                line += f" -x -a '{' '.join(flag.values)}'"
            elif flag.takes_value:
                line += " -r" if flag.is_file else " -x"
            lines.append(line)
    return "\n".join(lines)
