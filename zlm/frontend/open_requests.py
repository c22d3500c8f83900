"""The requests that wait for the tokenizer: by internal id, each with who answers its client.

Owns the ids, the table, and which tokenizer has how many of them. Dispatching a batch of deltas is
plain calls: no task, future or event a request. Streams that got news are flushed once, at the end
of the loop's turn, so that each connection sees one write however many batches had queued.
"""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from zlm.errors import BadRequest, Overloaded, ZlmError
from zlm.messages import (
    Cancel,
    Delta,
    Deltas,
    DetokenizedText,
    Failed,
    Message,
    Pool,
    Pooled,
    Tokens,
    first_id,
)
from zlm.sampling_params import StructuredOutputsParams
from zlm.tokenizer.sampling import out_of_vocabulary

Send = Callable[[Message], None]


class OpenRequest(Protocol):
    """Who answers the client of one open request."""

    def take(self, delta: Delta) -> bool:
        """Keep *delta*; return whether ``flush`` must be called and is not yet going to be."""

    def flush(self) -> None:
        """Send what is kept."""

    def finish(self, result: Any) -> None:
        """Answer with *result* (Tokens, DetokenizedText or Pooled)."""

    def fail(self, error: ZlmError) -> None:
        """End the answer with *error*."""


class OpenRequests:
    """All open requests of this front end.

    *soon* calls a function at the end of the loop's turn; ``on_empty`` is called when the last
    request is over.
    """

    def __init__(
        self, index: int, soon: Callable[[Callable[[], None]], Any], incarnation: int = 0
    ) -> None:
        self._next_id = first_id(index, incarnation) + 1
        self._tokenizers: list[Send | None] = []  # None: it is dead
        self._loads: list[int] = []
        self._preferred = index  # of tokenizers, modulo their number
        self._soon = soon
        self._open: dict[int, tuple[OpenRequest, int]] = {}
        self._unflushed: list[OpenRequest] = []
        self.on_empty: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def loads(self) -> list[int]:
        """Open requests at each tokenizer."""
        return self._loads

    def connect(self, tokenizers: list[Send]) -> None:
        """Take the ways to the tokenizer processes; before the first request."""
        self._tokenizers = list(tokenizers)
        self._loads = [0] * len(tokenizers)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to send requests to."""
        return any(send is not None for send in self._tokenizers)

    def reconnect(self, number: int, send: Send) -> None:
        """Use a tokenizer that has taken the place of one that was lost."""
        self.lose(number, Overloaded("the tokenizer was replaced; try again"))
        self._tokenizers[number] = send

    def lose(self, number: int, error: ZlmError) -> None:
        """End every request of a tokenizer that is dead with *error*, and use it no more."""
        self._tokenizers[number] = None
        for request, at in list(self._open.values()):
            if at == number:
                request.fail(error)

    def new_id(self) -> int:
        """Return an id no other request of the server has."""
        self._next_id += 1
        return self._next_id - 1

    def submit(self, request_id: int, command: Message, request: OpenRequest) -> None:
        """Send *command* to the least loaded tokenizer; *request* gets what comes of it.

        Raises OverflowError or RecursionError if the client's values do not fit a message (see
        ``unfit``), Overloaded if there is no tokenizer.
        """
        number = self._least_loaded()
        send = self._tokenizers[number] if self._tokenizers else None
        if send is None:
            raise Overloaded("every tokenizer is being restarted; try again")
        send(command)
        self._loads[number] += 1
        self._open[request_id] = (request, number)

    def _least_loaded(self) -> int:
        """Return the tokenizer with the fewest requests of ours; of equals, not always the first.

        Front ends know nothing of one another's requests: each prefers another tokenizer.
        """
        count = len(self._loads)
        turned = [number % count for number in range(self._preferred, self._preferred + count)]
        living = [number for number in turned if self._tokenizers[number] is not None]
        return min(living or [0], key=self._loads.__getitem__)

    def release(self, request_id: int) -> None:
        """Forget a request that is over."""
        _, number = self._open.pop(request_id)
        self._loads[number] -= 1
        if not self._open and self.on_empty is not None:
            self.on_empty()

    def cancel(self, request_id: int) -> None:
        """Forget a request whose answer nobody wants, and stop the work on it."""
        self._cancel(request_id)
        self.release(request_id)

    def fail_all(self, error: ZlmError) -> None:
        """End every open request with *error*."""
        for request_id, (request, _) in list(self._open.items()):
            self._cancel(request_id)
            request.fail(error)

    def _cancel(self, request_id: int) -> None:
        _, number = self._open[request_id]
        send = self._tokenizers[number]
        if send is not None:
            send(Cancel(request_id))

    # ------------------------------------------------------------------- from the tokenizer

    def take_deltas(self, message: Deltas) -> None:
        """Hand each delta to its request; those of requests that are over are dropped."""
        found = self._open.get
        unflushed = self._unflushed
        was_empty = not unflushed
        for delta in message.items:
            entry = found(delta.request_id)
            if entry is not None and entry[0].take(delta):
                unflushed.append(entry[0])
        if was_empty and unflushed:
            self._soon(self._flush)

    def take_result(self, message: Tokens | DetokenizedText | Pooled) -> None:
        """Answer the request that *message* belongs to."""
        entry = self._open.get(message.request_id)
        if entry is not None:
            entry[0].finish(message)

    def take_failure(self, message: Failed) -> None:
        """End the request that *message* belongs to with its error."""
        entry = self._open.get(message.request_id)
        if entry is not None:
            entry[0].fail(failure(message))

    def _flush(self) -> None:
        requests, self._unflushed = self._unflushed, []
        for request in requests:
            request.flush()


_BODY_NAMES = {
    "prompts": "prompt",
    "token_ids": "tokens",
    "template_kwargs": "chat_template_kwargs",
}
_IDS = ("prompts", "token_ids", "stop_token_ids", "allowed_token_ids")


def unfit(command: msgspec.Struct, vocab_size: int) -> BadRequest:
    """Return the error for a client's value in *command* that no message can hold."""
    for name in command.__struct_fields__:
        value = getattr(command, name)
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            problem = "integers of more than 64 bits are not taken"
        except RecursionError:
            problem = "it is nested too deeply"
        else:
            continue
        param = _BODY_NAMES.get(name, name)
        if isinstance(value, StructuredOutputsParams):
            param = value.source
        elif isinstance(value, msgspec.Struct):
            return unfit(value, vocab_size)
        elif name in _IDS:
            param = "input" if isinstance(command, Pool) else param
            lists = [each if isinstance(each, list) else [each] for each in value]
            ids = [each for given in lists for each in given if isinstance(each, int)]
            return out_of_vocabulary(param, ids, vocab_size)
        return BadRequest(f"{param}: {problem}", param=param)
    return BadRequest("the body has a value that is out of range")


def failure(message: Failed) -> ZlmError:
    """Return *message* as the error it tells of."""
    return ZlmError(
        message.message,
        param=message.param,
        code=message.code,
        status=message.status,
        type=message.error_type,
        retry_after_seconds=message.retry_after_seconds,
    )
