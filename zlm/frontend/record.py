"""What is told of one request when it is over: in the log, in the metrics and in traces.

Filled while the request is answered, by whoever learns it; read once, at its end. Times are
``time.monotonic()``, seconds. Holds nothing that a client has written but the name of its model.
"""

from http import HTTPStatus

from zlm.errors import ZlmError, clip
from zlm.messages import Delta, Generate, Pool, Pooled


class Record:
    """The facts of one request beside its route, status and ids."""

    __slots__ = (
        "failure",
        "finish_reasons",
        "first_token_at",
        "model",
        "num_cached_tokens",
        "num_sequences",
        "params",
        "rejection",
        "started_at",
        "stream",
    )

    def __init__(self) -> None:
        self.model = ""  # the name the client asked for
        self.stream = False
        self.num_sequences = 0  # that were asked of the engine: choices, or texts to be pooled
        self.num_cached_tokens = 0
        self.finish_reasons: list[str] = []  # of the sequences that came to their end
        self.started_at = 0.0  # the engine core first gave it room (its first sequence)
        self.first_token_at = 0.0  # its first token was known
        self.rejection = ""  # why it was refused: a word
        self.failure = ""  # why it was answered with a fault of this side
        self.params: dict[str, float | int] = {}  # what was asked for, as traces tell it

    def describe(self, command: Generate | Pool) -> None:
        """Take note of what is asked of the engine."""
        self.num_sequences = len(command.prompts)
        if isinstance(command, Generate):
            params = command.params
            self.stream = command.stream
            self.num_sequences = max(1, self.num_sequences) * params.n
            asked = {
                "n": params.n,
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
            }
            self.params = {name: value for name, value in asked.items() if value is not None}

    def take(self, delta: Delta) -> None:
        """Take note of what *delta* says of its choice."""
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
        if delta.times is not None:
            started, first = delta.times
            if not self.started_at or started < self.started_at:
                self.started_at = started
            if not self.first_token_at or first < self.first_token_at:
                self.first_token_at = first

    def take_pooled(self, result: Pooled) -> None:
        """Take note of the vectors that end a request for them."""
        self.finish_reasons = ["stop"] * self.num_sequences
        if result.times is not None:
            self.started_at, self.first_token_at = result.times

    def note(self, error: ZlmError) -> None:
        """Note why the request is answered with *error*: it is refused, or it has failed.

        One that was let in and then lost, for want of an engine say, has failed.
        """
        unserved = error.status == HTTPStatus.SERVICE_UNAVAILABLE and not self.num_sequences
        if error.status < 500 or unserved:
            self.rejection = error.code or HTTPStatus(error.status).name.lower()
        else:
            self.failure = clip(error.message)

    @property
    def finish_reason(self) -> str:
        """How its sequences ended: one word if all did alike, else each once; may be empty."""
        return ",".join(dict.fromkeys(self.finish_reasons))
