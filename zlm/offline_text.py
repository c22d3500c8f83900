"""The answer to one prompt as ``LLM`` and ``AsyncLLM`` give it: gathered from what comes of it."""

from collections.abc import Callable

from zlm.errors import ZlmError
from zlm.messages import Delta, Failed, Generate, Pooled, TokenLogprob
from zlm.offline import as_error
from zlm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from zlm.sampling_params import RequestOutputKind


class TextAnswer:
    """Takes the news of one request; ``whole`` and ``news`` are what is to be told of it."""

    def __init__(
        self, request: Generate, text: str | None, detokenize: Callable[[list[int]], str]
    ) -> None:
        """*text*: the prompt, if it was given as text. *detokenize* gives that of a chat."""
        ids: list[int] = next((p for p in request.prompts if isinstance(p, list)), [])
        self._output = RequestOutput(str(request.request_id), text, ids, [], finished=False)
        self._request = request
        self._detokenize = detokenize
        self._samples = [CompletionOutput(i, "", []) for i in range(request.params.n)]
        self._fresh: list[Delta] = []  # not told yet
        self.error: ZlmError | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample is over."""
        return all(sample.finish_reason is not None for sample in self._samples)

    @property
    def has_news(self) -> bool:
        """Whether there is something that was not told yet, an error too."""
        if self._request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return self.finished or self.error is not None
        return bool(self._fresh) or self.error is not None

    def take(self, news: Delta | Pooled | Failed) -> None:
        """Take in what the tokenizer core says of the request."""
        if isinstance(news, Failed):
            self.error = as_error(news)
            return
        assert isinstance(news, Delta), "text was asked for"
        self._fresh.append(news)
        _extend(self._samples[news.index], news)
        self._output.num_cached_tokens = news.num_cached_tokens
        if news.prompt_token_ids is not None:
            self._output.prompt_token_ids = news.prompt_token_ids
            if self._request.chat is not None and self._output.prompt is None:
                self._output.prompt = self._detokenize(news.prompt_token_ids)
        if news.prompt_logprobs is not None and self._output.prompt_logprobs is None:
            self._output.prompt_logprobs = [_position(entry) for entry in news.prompt_logprobs]

    def news(self) -> RequestOutput:
        """Return what is to be told now, in the form that the parameters ask for.

        Raises the error that ended the request.
        """
        if self.error is not None:
            raise self.error
        fresh, self._fresh = self._fresh, []
        samples = self._samples
        if self._request.params.output_kind is RequestOutputKind.DELTA:
            parts: dict[int, CompletionOutput] = {}
            for delta in fresh:
                empty = CompletionOutput(delta.index, "", [])
                _extend(parts.setdefault(delta.index, empty), delta)
            samples = [parts[index] for index in sorted(parts)]
        return self._told([_copy(sample) for sample in samples])

    def whole(self) -> RequestOutput:
        """Return the whole answer; what the engine could not finish says so."""
        if self.error is None:
            return self._told(self._samples)
        self._output.error = self.error.message
        samples = [CompletionOutput(s.index, "", [], finish_reason="error") for s in self._samples]
        return self._told(samples)

    def _told(self, samples: list[CompletionOutput]) -> RequestOutput:
        output = self._output
        return RequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            samples,
            prompt_logprobs=output.prompt_logprobs,
            finished=self.finished or self.error is not None,
            num_cached_tokens=output.num_cached_tokens,
            error=output.error,
        )


def _extend(sample: CompletionOutput, delta: Delta) -> None:
    sample.text += delta.text
    sample.token_ids += delta.token_ids or []
    sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
    if delta.logprobs is not None:
        sample.logprobs = sample.logprobs or []
        sample.logprobs += [_position(entry) or {} for entry in delta.logprobs]
        fresh = sum(entry.logprob or 0.0 for entry in delta.logprobs)
        sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + fresh


def _copy(sample: CompletionOutput) -> CompletionOutput:
    """Return *sample* as it is now: the caller may keep it."""
    logprobs = None if sample.logprobs is None else list(sample.logprobs)
    return CompletionOutput(
        sample.index,
        sample.text,
        list(sample.token_ids),
        sample.cumulative_logprob,
        logprobs,
        sample.finish_reason,
        sample.stop_reason,
    )


def _position(entry: TokenLogprob) -> PositionLogprobs | None:
    """Return the candidates of one position by id: the token that stands there comes first."""
    if entry.logprob is None:
        return None
    chosen = Logprob(entry.logprob, entry.rank or None, entry.token)
    candidates = {entry.token_id: chosen}
    for rank, (token_id, token, _, logprob) in enumerate(entry.top, 1):
        candidates.setdefault(token_id, Logprob(logprob, rank, token))
    return candidates
