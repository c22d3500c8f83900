"""One choice of an answer: a sequence's tokens becoming text, log-probabilities and deltas.

Pure: tokens in, ``Delta`` out. Owns the text state of one sequence: what the detokenizer and the
stop strings hold back, and the log-probability entries that wait for the text they belong to. Most
streams ask for neither: once their first delta is out, ``next_delta`` takes the short way.

    produced  |------------------------------|      text the detokenizer has given
    emitted   |---------------------|               text given to the client; between: held back
    entries   [0,5) [5,5) [5,9) ...                 each goes out once its end is emitted
"""

from collections import deque
from dataclasses import dataclass, field

from zlm.messages import (
    FINISH_ABORT,
    FINISH_EOS,
    FINISH_GRAMMAR,
    FINISH_LENGTH,
    FINISH_STOP_ID,
    RUNNING,
    Delta,
    TokenLogprob,
)
from zlm.tokenizer.detokenize import Detokenizer
from zlm.tokenizer.logprobs import with_top
from zlm.tokenizer.output_parts import OutputParts
from zlm.tokenizer.stop_strings import StopMatch, StopMatcher

_REASONS = {
    FINISH_EOS: "stop",
    FINISH_STOP_ID: "stop",
    FINISH_GRAMMAR: "stop",
    FINISH_LENGTH: "length",
    FINISH_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """What a request wants of its choices; shared by them."""

    stream: bool
    stops: list[str]
    include_stop: bool
    min_tokens: int
    return_token_ids: bool
    logprobs: int | None  # alternatives beside each output token; None: no logprobs
    prompt_logprobs: int | None  # the same for prompt tokens, reported apart
    echo: bool  # the text of the prompt goes before the output
    echo_logprobs: bool  # so do the entries of its tokens

    @property
    def is_plain(self) -> bool:
        """Whether all deltas after a choice's first carry nothing but each token's own text."""
        asks_more = self.stops or self.return_token_ids or self.logprobs is not None
        return self.stream and not asks_more


@dataclass(slots=True)
class Prompt:
    """A prompt, shared by its samples. ``logprobs`` grows while the prompt is computed."""

    token_ids: list[int]
    text: str  # what echo shows
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of ``logprobs`` in the text, if echoed

    def take_logprobs(self, entries: list[TokenLogprob]) -> None:
        """Take the entries of the next tokens; what was told before is not told again."""
        self.logprobs += entries[: len(self.token_ids) - len(self.logprobs)]


@dataclass(slots=True)
class _Waiting:
    """A log-probability entry and the text it belongs to; ``end`` None: not known yet."""

    start: int
    end: int | None
    entry: TokenLogprob


class Choice:
    """One sequence. ``push`` tokens, ``finish`` it, and take a ``delta`` after either.

    ``is_plain``: from now on ``next_delta`` may stand for ``push`` and ``delta``.
    """

    def __init__(
        self,
        request_id: int,
        index: int,
        prompt: Prompt,
        detokenizer: Detokenizer | None,
        options: ChoiceOptions,
        parts: OutputParts | None = None,
    ) -> None:
        """*detokenizer* None: no text is wanted. *parts* None: all text is content."""
        self.request_id = request_id
        self.index = index
        self.prompt = prompt
        self.num_cached_tokens = 0
        self.times: tuple[float, float] | None = None  # as Delta tells them
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.is_plain = False
        self._detokenizer = detokenizer
        self._options = options
        self._matcher = StopMatcher(options.stops) if options.stops else None
        self._parts = parts
        self._num_output_tokens = 0
        self._first = True  # no delta has been taken
        self._ready: list[str] = []  # text for the next delta
        self._token_ids: list[int] = []  # for the next delta
        self._produced = 0
        self._emitted = 0
        self._entries: deque[_Waiting] = deque()

    def advance(self, token_id: int, finish: int, entry: TokenLogprob | None) -> None:
        """Take in one row of the engine's news: a token or -1, and a finish code."""
        if token_id >= 0:
            if finish in (FINISH_EOS, FINISH_STOP_ID) and not self._options.include_stop:
                self.push_hidden(token_id, entry)
            elif self.push(token_id, entry):
                return
        if finish != RUNNING:
            ended_by = token_id if finish == FINISH_STOP_ID and token_id >= 0 else None
            self.finish(_REASONS[finish], ended_by)

    def push(self, token_id: int, entry: TokenLogprob | None) -> bool:
        """Take the next token; return whether the text ended with it (a stop string, say)."""
        self._count(token_id)
        start = self._produced
        text, pending = "", False
        if self._detokenizer is not None:
            start += self._detokenizer.whole_held if entry is not None else 0
            text = self._detokenizer.push(token_id)
            pending = self._detokenizer.pending
        self._produced += len(text)
        if text:
            self._settle()
        if entry is not None and self._options.logprobs is not None:
            end = None if pending else self._produced
            self._entries.append(_Waiting(start, end, entry))
        return bool(text) and self._emit(text)

    def next_delta(self, token_id: int) -> Delta | None:
        """Take the next token of a choice that ``is_plain``; return its text, if it has any yet."""
        assert self._detokenizer is not None
        self._num_output_tokens += 1
        text = self._detokenizer.push(token_id)
        if not text:
            return None
        return Delta(
            self.request_id,
            self.index,
            text,
            len(self.prompt.token_ids),
            self.num_cached_tokens,
            self._num_output_tokens,
        )

    def finish(self, reason: str, stop_reason: int | None = None) -> None:
        """End the sequence: what is held back goes out, a stop string that waited counts."""
        text = "" if self._detokenizer is None else self._detokenizer.flush()
        self._produced += len(text)
        self._settle()
        if text and self._emit(text):
            return
        if self._matcher is not None:
            held, match = self._matcher.flush()
            self._release(held)
            if match is not None:
                self._stop_at(match)
                return
        self._end(reason, stop_reason)

    def push_hidden(self, token_id: int, entry: TokenLogprob | None) -> None:
        """Take the token that ended the sequence (EOS or a stop id): it counts, without text."""
        self._count(token_id)
        if entry is not None and self._options.logprobs is not None:
            self._entries.append(_Waiting(self._produced, None, entry))

    def delta(self) -> Delta | None:
        """Return what is new, None if there is nothing to tell yet."""
        finished = self.finish_reason is not None
        options = self._options
        if not (finished or options.stream):
            return None
        taken = self._take_entries(finished)
        entries, echoed = [each.entry for each in taken], len(self.prompt.text) * options.echo
        offsets = [each.start + echoed for each in taken]
        text = "".join(self._ready)
        if self._first and options.echo:
            text = self.prompt.text + text
            if options.echo_logprobs and options.logprobs is not None:
                entries = with_top(self.prompt.logprobs, options.logprobs) + entries
                offsets = self.prompt.offsets + offsets
        ids_alone = self._token_ids if self._detokenizer is None else ()  # news without any text
        parts = self._parts
        if not (text or entries or finished or ids_alone or (parts and parts.has_news)):
            return None
        reasoning, tool_calls = ("", []) if parts is None else parts.take()
        delta = Delta(
            request_id=self.request_id,
            index=self.index,
            text=text,
            num_prompt_tokens=len(self.prompt.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            token_ids=self._token_ids if options.return_token_ids else None,
            times=self.times if finished else None,
            prompt_token_ids=self.prompt.token_ids
            if self._first and options.return_token_ids
            else None,
            logprobs=entries if options.logprobs is not None else None,
            text_offsets=offsets,
            prompt_logprobs=with_top(self.prompt.logprobs, options.prompt_logprobs)
            if self._first and options.prompt_logprobs is not None
            else None,
            reasoning=reasoning,
            tool_calls=tool_calls,
        )
        self._first = False
        self.is_plain = options.is_plain and self._detokenizer is not None
        if parts is not None and not parts.passes_on:
            self.is_plain = False
        self._ready = []
        self._token_ids = []
        return delta

    def _count(self, token_id: int) -> None:
        self._num_output_tokens += 1
        if self._options.return_token_ids:
            self._token_ids.append(token_id)

    def _settle(self) -> None:
        """Bytes that were held back have become text: their tokens end here."""
        for waiting in reversed(self._entries):
            if waiting.end is not None:
                return
            waiting.end = self._produced

    def _emit(self, text: str) -> bool:
        if self._matcher is None:
            self._release(text)
            return self._has_enough()
        armed = self._num_output_tokens > self._options.min_tokens
        released, match = self._matcher.push(text, armed=armed)
        self._release(released)
        if match is None:
            return self._has_enough()
        self._stop_at(match)
        return True

    def _release(self, text: str) -> None:
        if text:
            self._ready.append(text if self._parts is None else self._parts.push(text))
            self._emitted += len(text)

    def _has_enough(self) -> bool:
        """End the sequence if its parts are all that is wanted of it."""
        if self._parts is None or not self._parts.enough:
            return False
        self._end("stop")
        return True

    def _end(self, reason: str, stop_reason: int | str | None = None) -> None:
        if self._parts is not None:
            self._ready.append(self._parts.flush(reason))
            reason = self._parts.finish_reason(reason)
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _stop_at(self, match: StopMatch) -> None:
        cut = match.start
        if self._options.include_stop:
            self._release(match.stop)
            cut = match.end
        # A token without text that stands right before the stop has been told by a stream.
        self._entries = deque(w for w in self._entries if w.start < cut or w.end == w.start == cut)
        self._end("stop", match.stop)

    def _take_entries(self, finished: bool) -> list[_Waiting]:
        taken = []
        entries = self._entries
        while entries:
            end = entries[0].end
            if not finished and (end is None or end > self._emitted):
                break
            taken.append(entries.popleft())
        return taken
