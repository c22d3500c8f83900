"""Renders templates that clients send in a process apart, which can be killed.

A template is a program. The checkpoint's own is trusted as the weights are, but one from a request
may be written to eat time or memory in a single operation that nothing in the process can
interrupt. So such templates are rendered by a child with an address-space limit, which is killed
when it does not answer in time. The child is started at the first use, kept, and replaced after a
kill; it ends when its standard input closes.

Frames on both pipes: 4 bytes little-endian length, then msgpack.
"""

import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from typing import IO

import msgspec

from zlm.errors import BadRequest, ZlmError
from zlm.tokenizer.template_render import Conversation, render

MEMORY_BYTES = 1 << 30  # address space of the child
START_SECONDS = 10.0  # to start the child, on top of the time to render


class Answer(msgspec.Struct, frozen=True):
    """The text, or what is wrong."""

    text: str = ""
    error: str | None = None
    param: str | None = None


class TemplateProcess:
    """Owns the child. ``render`` blocks its caller for at most the conversation's time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, conversation: Conversation) -> str:
        """Return what ``template_render.render`` returns; raises what it raises."""
        if self._child is None or self._child.poll() is not None:
            self._start()
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        limit = time.monotonic() + conversation.seconds
        try:
            _write(child.stdin, msgspec.msgpack.encode(conversation))
            frame = _read_until(child.stdout.fileno(), limit)
        except (BrokenPipeError, EOFError):
            self.close()
            message = "the chat template needs too much memory"
            raise BadRequest(message, param="chat_template") from None
        except TimeoutError:
            self.close()
            message = f"the chat template took longer than {conversation.seconds:g} seconds"
            raise BadRequest(message, param="chat_template") from None
        answer = msgspec.msgpack.decode(frame, type=Answer)
        if answer.error is not None:
            raise BadRequest(answer.error, param=answer.param)
        return answer.text

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> None:
        self.close()
        command = [sys.executable, "-m", "zlm.tokenizer.template_process"]
        pipe = subprocess.PIPE
        # In a session of its own: a Ctrl-C in the terminal is the parent's business.
        self._child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
        )
        assert self._child.stdout is not None
        _read_until(self._child.stdout.fileno(), time.monotonic() + START_SECONDS)


def _write(pipe: IO[bytes], payload: bytes) -> None:
    view = memoryview(len(payload).to_bytes(4, "little") + payload)
    while view:
        view = view[pipe.write(view) :]


def _read_until(descriptor: int, limit: float) -> bytes:
    """Return the next frame; TimeoutError after *limit* (monotonic), EOFError at the end."""
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "little"):
            left = limit - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise EOFError
            received += chunk
    return bytes(received[4:])


def _serve() -> None:
    """Answer conversations on standard input until it closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    reader, writer = sys.stdin.buffer, os.fdopen(sys.stdout.fileno(), "wb", buffering=0)
    _write(writer, b"")
    while header := reader.read(4):
        payload = reader.read(int.from_bytes(header, "little"))
        conversation = msgspec.msgpack.decode(payload, type=Conversation)
        # Should the parent be gone, nobody would kill this process: the kernel does.
        signal.setitimer(signal.ITIMER_REAL, 2 * conversation.seconds)
        try:
            answer = Answer(text=render(conversation))
        except ZlmError as error:
            answer = Answer(error=error.message, param=error.param)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(writer, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    _serve()
