"""An open request for text: deltas in, one answer or a stream of frames out.

Owns what is not yet sent. A stream whose socket is behind keeps its deltas and joins those of one
choice into one frame when the socket has caught up. Knows neither completions nor chat: the form
(``AnswerForm``) makes the JSON.
"""

import logging
from collections.abc import Callable
from typing import Any

from zlm.errors import Internal, Overloaded, ZlmError
from zlm.frontend import sse
from zlm.frontend.exchange import Exchange
from zlm.frontend.openai.answer import AnswerForm, Usage
from zlm.frontend.openai.fields import StreamOptions
from zlm.messages import Delta

logger = logging.getLogger("zlm.frontend.generation")

MOST_PENDING = 256  # deltas kept one by one for a socket that is behind; then they are joined


class Generation:
    """One completion or chat request until its last token is sent.

    *release* has it forgotten; *cancel* also stops the work on it.
    """

    __slots__ = (
        "_aborted",
        "_cancel",
        "_exchange",
        "_form",
        "_options",
        "_over",
        "_pending",
        "_release",
        "_stream",
        "_templates",
        "_unfinished",
        "_unflushed",
        "_usage",
    )

    def __init__(
        self,
        exchange: Exchange,
        form: AnswerForm,
        *,
        num_choices: int,
        samples: int,
        stream: bool,
        options: StreamOptions,
        release: Callable[[], None],
        cancel: Callable[[], None],
    ) -> None:
        """*num_choices* is prompts times *samples*."""
        self._exchange = exchange
        self._form = form
        self._stream = stream
        self._options = options
        self._release = release
        self._cancel = cancel
        self._usage = Usage(num_choices, samples)
        self._templates: dict[int, tuple[bytes, bytes]] = {}  # of choices that have begun
        self._pending: list[Delta] = []
        self._unfinished = num_choices
        self._unflushed = False
        self._aborted = False
        self._over = False
        exchange.on_writable = self.flush
        exchange.on_disconnect = self._disconnected
        exchange.on_abort = self._break

    def take(self, delta: Delta) -> bool:
        """Keep *delta*; return whether a flush is now due and was not before."""
        self._usage.count(delta)
        self._exchange.record.take(delta)
        self._pending.append(delta)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            if delta.finish_reason == "abort":
                self._aborted = True
        if self._unflushed or not (self._stream or self._unfinished == 0):
            return False
        self._unflushed = True
        return True

    def flush(self) -> None:
        """Send what is kept, unless the socket is behind; end the answer after the last of it."""
        self._unflushed = False
        if self._over or not self._pending:
            return
        try:
            if self._aborted:
                self._break(Overloaded("the server ended the request before it was done"))
            elif not self._stream:
                self._answer()
            elif self._exchange.writable:
                self._send_frames()
            elif len(self._pending) > MOST_PENDING:
                self._pending = sse.merge(self._pending)
        except Exception:
            logger.exception("an answer could not be written")
            self._break(Internal("the server failed to write the answer"))

    def finish(self, result: Any) -> None:
        raise TypeError(f"a generation was answered with {type(result).__name__}")

    def fail(self, error: ZlmError) -> None:
        """End the answer: with *error*'s status, or in a stream that has begun with an event."""
        if not self._over:
            self._end(self._release)
            self._tell(error)

    def _break(self, error: ZlmError) -> None:
        """End the answer with an error of this side: the work on it is to stop as well."""
        if not self._over:
            self._end(self._cancel)
            self._tell(error)

    def _disconnected(self) -> None:
        if not self._over:
            self._end(self._cancel)

    def _tell(self, error: ZlmError) -> None:
        if self._exchange.status == 0:
            self._exchange.respond_error(error)
        else:
            self._exchange.fault = error.message
            self._exchange.end(sse.event(error.body()), close=True)

    def _end(self, forget: Callable[[], None]) -> None:
        """Note the counts for the log, and have the request forgotten."""
        self._over = True
        self._exchange.num_prompt_tokens = self._usage.prompt_tokens
        self._exchange.num_output_tokens = self._usage.completion_tokens
        self._exchange.record.num_cached_tokens = self._usage.cached_tokens
        forget()

    def _answer(self) -> None:
        deltas = sorted(sse.merge(self._pending), key=lambda delta: delta.index)
        body = sse.encode(self._form.answer(deltas, self._usage.body()))
        self._end(self._release)
        self._exchange.respond(200, body)

    def _send_frames(self) -> None:
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            frames = self._frame(pending[0])
        else:
            frames = b"".join([self._frame(delta) for delta in sse.merge(pending)])
        if self._unfinished:
            if frames:
                self._exchange.write(frames)
            return
        if self._options.include_usage:
            frames += sse.event(self._form.usage_chunk(self._usage.body()))
        self._end(self._release)
        self._exchange.end(frames + sse.DONE)

    def _frame(self, delta: Delta) -> bytes:
        """Return the bytes that tell *delta*; none if it has nothing to tell."""
        plain = sse.is_plain(delta)
        if plain and not delta.text:
            return b""
        index = delta.index
        template = self._templates.get(index)
        if template is None:  # this choice's first frame
            chunk = self._with_usage(self._form.text_chunk(index, sse.PLACE))
            self._templates[index] = sse.template(chunk)
        elif plain and not self._options.continuous:
            return b"%b%b%b" % (template[0], sse.encode(delta.text), template[1])
        return sse.event(self._with_usage(self._form.chunk(delta, first=template is None)))

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add the usage so far, or null where the stream's last chunk will tell it."""
        if self._options.continuous:
            chunk["usage"] = self._usage.body()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk
