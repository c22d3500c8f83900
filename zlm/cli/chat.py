"""``zlm chat``: a conversation in the terminal, with a server that runs or a model in place.

    zlm chat MODEL [flags of zlm serve]
    zlm chat --url http://127.0.0.1:8000 [--model NAME]

Owns the conversation and the terminal. Ctrl-C stops an answer, Ctrl-D leaves. What was typed is
kept for the next time, for its owner alone, in ``$XDG_STATE_HOME/zlm/history``. Without a terminal
all of the standard input is one message, and only the answer is printed.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from zlm.cli import ask, values
from zlm.cli.ask import Asker, Piece
from zlm.cli.failures import told
from zlm.cli.own_server import OwnServer
from zlm.cli.parse import parse, parse_known
from zlm.errors import ConfigError, ZlmError
from zlm.process.logs import escape

LOOK_SECONDS = 0.1
HISTORY_LINES = 1000
BLOCK = '"""'
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what would command the terminal
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = """\
/new           begin a new conversation        /system TEXT   set the system prompt
/retry         answer the last message anew    /save FILE     write the conversation as JSON
/undo          take the last answer back       /load FILE     go on with one that was saved
/history       show the conversation           /exit          leave (or Ctrl-D)
A \\ at the end of a line continues it; between two lines of \"\"\" every line is one message."""


def main(words: Sequence[str]) -> int:
    """Run ``zlm chat`` with its arguments *words*; return the exit status."""
    options, flags = parse_known(parser("chat"), words)

    def work() -> int:
        with connected(options, flags, sys.stderr.isatty()) as (asker, name):
            chat = Chat(asker, body(options, name), options.system)
            return chat.once(sys.stdin.read()) if not sys.stdin.isatty() else chat.talk()

    return told("chat", work)


def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of ``zlm chat`` and ``zlm complete``; other flags are the server's."""
    made = argparse.ArgumentParser(
        prog=f"zlm {command}",
        usage=f"zlm {command} (MODEL [flags of zlm serve] | --url URL) [options]",
        description="Without a terminal all of the standard input is one message or prompt. "
        "Other flags are those of zlm serve, for a MODEL that is loaded.",
        allow_abbrev=False,
    )
    where = made.add_argument_group("who is asked")
    where.add_argument("model_path", metavar="MODEL", nargs="?", help="a model to load for this")
    where.add_argument("--url", help="of a server that runs, such as http://127.0.0.1:8000")
    where.add_argument("--model", dest="name", help="which of the server's models (its first)")
    key = os.environ.get("ZLM_API_KEY", "")
    where.add_argument("--api-key", default=key, metavar="KEY", help="its key ($ZLM_API_KEY)")
    what = made.add_argument_group("what is asked; the model's own settings where nothing is given")
    if command == "chat":
        what.add_argument("--system", default="", metavar="TEXT", help="system prompt (none)")
    else:
        what.add_argument("--prompt", metavar="TEXT", help="what to go on from (standard input)")
    room = "what the context has room for" if command == "chat" else "16"
    what.add_argument(
        "--max-tokens", type=values.max_tokens, metavar="N", help=f"of an answer ({room})"
    )
    heat = "0 takes the likeliest token"
    what.add_argument("--temperature", type=values.temperature, metavar="T", help=heat)
    top_p = values.ranged(values.number, 0, 1)
    what.add_argument("--top-p", type=top_p, metavar="P", help="share of them to draw from")
    seed = values.typed(values.integer)
    what.add_argument("--seed", type=seed, metavar="N", help="for the same answer again (random)")
    return made


def body(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the fields of every request."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    given = {key: getattr(options, key) for key in names}
    return {"model": name} | {key: value for key, value in given.items() if value is not None}


@contextmanager
def connected(
    options: argparse.Namespace, flags: Sequence[str], is_shown: bool
) -> Iterator[tuple[Asker, str]]:
    """Give the way to the server that is asked for and its model's name; our own ends with it."""
    if (options.url is None) == (options.model_path is None):
        raise ConfigError("give either MODEL, to load it, or --url of a server that runs")
    if options.url is not None:
        if flags:
            raise ConfigError(f"{flags[0]}: a server that runs takes no flags")
        asker = ask.by_url(options.url, options.api_key)
        yield asker, options.name or next(iter(asker.models()), "")
        return
    parse([options.model_path, *flags])  # wrong flags are told at once
    with OwnServer(options.model_path, flags) as server:
        asker = ask.by_socket(server.socket)
        _wait(server, asker, is_shown)
        yield asker, asker.models()[0]


def _wait(server: OwnServer, asker: Asker, is_shown: bool) -> None:
    began, status = time.monotonic(), 0
    while status != 200:
        server.check()
        with contextlib.suppress(OSError):  # it does not listen yet
            status, _ = asker.get("/health/ready")
        if is_shown:
            print(f"\rloading, {time.monotonic() - began:.0f} s ", end="", file=sys.stderr)
        if status != 200:
            time.sleep(LOOK_SECONDS)
    if is_shown:
        print("\r\x1b[K", end="", file=sys.stderr)


class Chat:
    """One conversation."""

    def __init__(self, asker: Asker, fields: dict[str, Any], system: str) -> None:
        self._asker = asker
        self._fields = fields
        self._system = system
        self.messages: list[dict[str, str]] = []
        self._commands: dict[str, Callable[[str], str]] = {
            "/new": self._new,
            "/system": self._set_system,
            "/undo": self._undo,
            "/retry": self._retry,
            "/history": self._history,
            "/save": self._save,
            "/load": self._load,
            "/help": lambda _: HELP,
        }

    def once(self, text: str) -> int:
        """Answer *text* and nothing else; return the exit status."""
        if not text.strip():
            raise ConfigError("the standard input, which is the message, is empty")
        self._answer(text.rstrip("\n"), sys.stdout.isatty())
        return 0

    def talk(self) -> int:
        """Answer line by line until the user leaves; return the exit status."""
        print(f"{self._fields['model']}   /help shows what can be said", file=sys.stderr)
        with _lines_kept(_history_file()):
            return self._loop()

    def _loop(self) -> int:
        while True:
            try:
                text = _message(input)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            if text.strip() in ("/exit", "/quit"):
                return 0
            if text.strip():
                self._respond(text)

    def _respond(self, text: str) -> None:
        word, _, rest = text.strip().partition(" ")
        try:
            if word in self._commands:
                print(self._commands[word](rest.strip()), file=sys.stderr)
            elif word.startswith("/") and "/" not in word[1:]:
                print(f"there is no {escape(word)}; /help shows what there is", file=sys.stderr)
            else:
                self._answer(text, True)
        except ZlmError as error:
            print(escape(error.message), file=sys.stderr)

    def _answer(self, text: str, is_terminal: bool) -> None:
        """Print the answer to *text* as it comes, and keep both."""
        asked = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        request = self._fields | {"messages": system + asked}
        heard: list[str] = []

        def kept(pieces: Iterator[Piece]) -> Iterator[Piece]:
            for piece in pieces:
                heard.append(piece.text)
                yield piece

        try:
            with closing(self._asker.stream("/v1/chat/completions", request)) as pieces:
                write(kept(pieces), is_terminal)
        except ZlmError:
            if not any(heard):
                raise
            print(PLAIN if is_terminal else "")  # after the part of an answer that came
            self.messages = [*asked, {"role": "assistant", "content": "".join(heard)}]
            raise
        self.messages = [*asked, {"role": "assistant", "content": "".join(heard)}]

    def _new(self, _: str) -> str:
        self.messages = []
        return "a new conversation"

    def _set_system(self, text: str) -> str:
        self._system = text
        return "the system prompt is set" if text else "there is no system prompt now"

    def _undo(self, _: str) -> str:
        del self.messages[-2:]
        return f"{len(self.messages) // 2} answers are left"

    def _retry(self, _: str) -> str:
        if not self.messages:
            return "there is no message yet"
        kept = self.messages
        *self.messages, asked, _answer = kept
        try:
            self._answer(asked["content"], True)
        except ZlmError:
            self.messages = kept
            raise
        return "the answer before is forgotten"

    def _history(self, _: str) -> str:
        lines = [f"{each['role']}: {CONTROL.sub('', each['content'])}" for each in self.messages]
        return "\n".join(lines) or "there is no message yet"

    def _load(self, name: str) -> str:
        if not name:
            return "give the name of a file: /load FILE"
        try:
            loaded = msgspec.json.decode(Path(name).read_bytes(), type=list[dict[str, str]])
            roles = [message["role"] for message in loaded if isinstance(message["content"], str)]
        except OSError as error:
            return f"cannot read {escape(name)}: {error.strerror}"
        except (msgspec.MsgspecError, KeyError):
            return f"{escape(name)} holds no conversation"
        system = 1 if roles[:1] == ["system"] else 0
        if roles[system:] != ["user", "assistant"] * ((len(roles) - system) // 2):
            return f"{escape(name)} holds no conversation of questions and answers"
        self._system = loaded[0]["content"] if system else ""
        self.messages = loaded[system:]
        return f"{len(self.messages) // 2} answers are there"

    def _save(self, name: str) -> str:
        if not name:
            return "give the name of a file: /save FILE"
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            content = json.dumps(system + self.messages, ensure_ascii=False, indent=2)
            Path(name).write_text(content + "\n")
        except OSError as error:
            return f"cannot write {escape(name)}: {error.strerror}"
        return f"written to {escape(name)}"


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "zlm" / "history"


@contextmanager
def _lines_kept(path: Path) -> Iterator[None]:
    """Let lines be edited, and those of earlier times be called back; keep this time's in *path*.

    A Python without readline has none of it; where *path* cannot be, nothing is kept.
    """
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            readline.write_history_file(path)


def _message(read: Callable[[str], str]) -> str:
    """Return the user's next message, which may have several lines."""
    line = read("> ")
    if line.strip() == BLOCK:
        lines = []
        while (line := read("  ")).strip() != BLOCK:
            lines.append(line)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read("  "))
    return "\n".join(lines)


def write(pieces: Iterator[Piece], is_terminal: bool) -> str:
    """Print *pieces* as they come, thoughts dimmed; return the text. Ctrl-C ends it early."""
    text, is_thinking = "", False
    try:
        for piece in pieces:
            text += piece.text
            if not is_terminal:
                print(piece.text, end="", flush=True)
                continue
            if piece.reasoning:
                start = "" if is_thinking else DIM
                print(start + CONTROL.sub("", piece.reasoning), end="", flush=True)
                is_thinking = True
            if piece.text:
                start = f"{PLAIN}\n\n" if is_thinking else ""
                print(start + CONTROL.sub("", piece.text), end="", flush=True)
                is_thinking = False
            if piece.finish_reason == "length":
                print(f"\n{DIM}(cut off by the limit of tokens){PLAIN}", end="")
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print(f"{PLAIN} {DIM}(stopped){PLAIN}", end="")
    print(PLAIN if is_thinking else "")
    return text
