"""An open request for token ids, their text, vectors or scores: one question, one answer."""

from collections.abc import Callable
from typing import Any

from zlm.errors import ZlmError
from zlm.frontend import sse
from zlm.frontend.exchange import Exchange
from zlm.messages import Delta, Pooled


class TokenizerCall:
    """One request that gets its answer in one message. *form* makes the body.

    *release* has it forgotten; *cancel* also stops the work on it.
    """

    __slots__ = ("_cancel", "_exchange", "_form", "_release")

    def __init__(
        self,
        exchange: Exchange,
        form: Callable[[Any], dict[str, Any]],
        *,
        release: Callable[[], None],
        cancel: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._release = release
        self._cancel = cancel
        exchange.on_disconnect = cancel
        exchange.on_abort = self._break

    def take(self, delta: Delta) -> bool:
        raise TypeError("a tokenizer call was answered with a Delta")

    def flush(self) -> None:
        """Nothing is ever kept."""

    def finish(self, result: Any) -> None:
        """Answer with *result*."""
        self._release()
        if isinstance(result, Pooled):
            self._exchange.num_prompt_tokens = sum(map(len, result.prompts))
            self._exchange.record.take_pooled(result)
        self._exchange.respond(200, sse.encode(self._form(result)))

    def _break(self, error: ZlmError) -> None:
        """Answer with *error* although the work on it goes on: it is to stop as well."""
        self._cancel()
        self._exchange.respond_error(error)

    def fail(self, error: ZlmError) -> None:
        """Answer with *error*."""
        self._release()
        self._exchange.respond_error(error)
