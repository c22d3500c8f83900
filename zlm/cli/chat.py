"""``zlm chat``: a conversation in the terminal, with a server that runs or a model in place.

    zlm chat MODEL [flags of zlm serve]
    zlm chat --url http://127.0.0.1:8000 [--model NAME]

Owns the conversation and the terminal. Ctrl-C stops an answer, Ctrl-D leaves. Without a terminal
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

from zlm.cli import ask
from zlm.cli.ask import Asker, Piece
from zlm.cli.failures import told
from zlm.cli.own_server import OwnServer
from zlm.cli.parse import parse
from zlm.errors import ConfigError, ZlmError
from zlm.process.logs import escape

LOOK_SECONDS = 0.1
BLOCK = '"""'
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what would command the terminal
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = """\
/new           begin a new conversation        /system TEXT   set the system prompt
/undo          take the last answer back       /save FILE     write the conversation as JSON
/help          show this                       /exit          leave (or Ctrl-D)
A \\ at the end of a line continues it; between two lines of \"\"\" every line is one message."""


def main(words: Sequence[str]) -> int:
    """Run ``zlm chat`` with its arguments *words*; return the exit status."""
    options, flags = parser("chat").parse_known_args(list(words))

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
        description="Without a terminal all of the standard input is one message or prompt.",
        allow_abbrev=False,
    )
    made.add_argument("model_path", metavar="MODEL", nargs="?", help="a model to load for this")
    made.add_argument("--url", help="of a server that runs, such as http://127.0.0.1:8000")
    made.add_argument("--model", dest="name", help="which of the server's models (the first)")
    made.add_argument("--api-key", default=os.environ.get("ZLM_API_KEY", ""), help="its key")
    made.add_argument("--max-tokens", type=int, help="of an answer")
    made.add_argument("--temperature", type=float)
    made.add_argument("--top-p", type=float)
    made.add_argument("--seed", type=int)
    if command == "chat":
        made.add_argument("--system", default="", help="system prompt")
    else:
        made.add_argument("--prompt", help="what to go on from (default: the standard input)")
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
        yield asker, options.name or asker.models()[0]
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
            "/save": self._save,
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
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then has a history and can be edited)
        print(f"{self._fields['model']}   /help shows what can be said", file=sys.stderr)
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
        if word in self._commands:
            print(self._commands[word](rest.strip()), file=sys.stderr)
        elif word.startswith("/") and "/" not in word[1:]:
            print(f"there is no {escape(word)}; /help shows what there is", file=sys.stderr)
        else:
            try:
                self._answer(text, True)
            except ZlmError as error:
                print(escape(error.message), file=sys.stderr)

    def _answer(self, text: str, is_terminal: bool) -> None:
        """Print the answer to *text* as it comes, and keep both."""
        asked = [*self.messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        request = self._fields | {"messages": system + asked}
        with closing(self._asker.stream("/v1/chat/completions", request)) as pieces:
            answer = write(pieces, is_terminal)
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _new(self, _: str) -> str:
        self.messages = []
        return "a new conversation"

    def _set_system(self, text: str) -> str:
        self._system = text
        return "the system prompt is set" if text else "there is no system prompt now"

    def _undo(self, _: str) -> str:
        del self.messages[-2:]
        return f"{len(self.messages) // 2} answers are left"

    def _save(self, name: str) -> str:
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            content = json.dumps(system + self.messages, ensure_ascii=False, indent=2)
            Path(name).write_text(content + "\n")
        except OSError as error:
            return f"cannot write {escape(name)}: {error.strerror}"
        return f"written to {escape(name)}"


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
