"""Tries grammars of clients in a process apart, which can be killed.

Compiling a grammar takes milliseconds, unless somebody has made one that takes for ever. So before
the engine core sees a grammar it is compiled here, for the model's own vocabulary, under a limit of
time and address space.
"""

from collections.abc import Callable

import msgspec

from zlm.engine.grammar import GrammarCompiler
from zlm.errors import BadRequest, Internal, ZlmError
from zlm.messages import Grammar, TokenBytes
from zlm.tokenizer.bounded_process import BoundedProcess, ChildSide

MEMORY_BYTES = 2 << 30  # address space of the child


class Start(msgspec.Struct, frozen=True):
    """What the child must know first."""

    tokens: TokenBytes
    vocab_size: int


class Task(msgspec.Struct, frozen=True):
    """A grammar to try, and the seconds that it may take."""

    grammar: Grammar
    seconds: float


class GrammarProcess(BoundedProcess):
    """The child. ``check`` blocks its caller for at most *seconds*."""

    def __init__(self, tokens: Callable[[], TokenBytes], vocab_size: int, seconds: float) -> None:
        """*vocab_size* is the number of logits of a row."""
        self._seconds = seconds
        super().__init__(
            "zlm.tokenizer.grammar_process",
            first=lambda: msgspec.msgpack.encode(Start(tokens(), vocab_size)),
        )

    def check(self, grammar: Grammar) -> ZlmError | None:
        """Return what is wrong with *grammar*, if something is."""
        task = Task(grammar, self._seconds)
        try:
            frame = self.call(msgspec.msgpack.encode(task), self._seconds)
        except EOFError:
            return BadRequest("the grammar needs too much memory to compile")
        except TimeoutError:
            return BadRequest(f"the grammar takes longer than {self._seconds:g} seconds to compile")
        except OSError as error:
            return Internal(f"the process that checks grammars cannot be started: {error}")
        problem = frame.decode()
        return BadRequest(problem) if problem else None


def _serve() -> None:
    """Answer tasks on standard input, with what is wrong or nothing, until it closes."""
    side = ChildSide(MEMORY_BYTES)
    frame = side.receive()
    if frame is None:
        return
    start = msgspec.msgpack.decode(frame, type=Start)
    compiler = GrammarCompiler(start.tokens, start.vocab_size)
    side.send(b"")
    while (payload := side.receive()) is not None:
        task = msgspec.msgpack.decode(payload, type=Task)
        side.die_after(2 * task.seconds)
        problem = ""
        try:
            compiler.compile(task.grammar)
        except ZlmError as error:
            problem = error.message
        side.send(problem.encode())


if __name__ == "__main__":
    _serve()
