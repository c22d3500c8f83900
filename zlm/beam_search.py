"""Beam search over an engine that gives the likeliest next tokens of a sequence.

``BeamSearch`` is the search of one prompt: pure, it is told candidates and says what to follow. It
finds what transformers finds with ``early_stopping="never"``: a search ends only when nothing that
is still followed can become better than the worst of ``beam_width`` finished outputs.
``beam_searches`` is a call of ``LLM`` in rounds: it yields the requests of a round, one a beam, and
is sent their answers. The prefix cache makes a round cost little more than a step.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

from zlm.config import Resolved
from zlm.errors import BadRequest, Internal, TooLong
from zlm.messages import Delta, Failed, Generate
from zlm.offline import Answer, OfflineEngine
from zlm.offline_calls import TextCall
from zlm.outputs import BeamSearchOutput, BeamSearchSequence, Logprob
from zlm.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams


@dataclass(frozen=True, slots=True)
class Beam:
    """An output, or the beginning of one."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    total: float = 0.0  # of the log-probabilities

    def then(self, token: int, entry: Logprob) -> "Beam":
        """Return it with one more token."""
        return Beam((*self.tokens, token), (*self.logprobs, entry), self.total + entry.logprob)


@dataclass(slots=True)
class BeamSearch:
    """One search. ``finished`` are the best finished outputs with their scores, best first."""

    params: BeamSearchParams
    eos_ids: frozenset[int]
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[tuple[float, Beam]] = field(default_factory=list)

    def advance(self, candidates: Sequence[Iterable[tuple[int, Logprob]]]) -> None:
        """Take the likeliest next tokens of each running beam: ``beam_width`` and the EOS ids."""
        width = self.params.beam_width
        longer = [
            beam.then(token, entry)
            for beam, found in zip(self.running, candidates, strict=True)
            for token, entry in found
        ]
        longer.sort(key=lambda beam: beam.total, reverse=True)
        is_last = len(longer[0].tokens) == self.params.max_tokens
        self.running = []
        for rank, beam in enumerate(longer):
            if is_last or beam.tokens[-1] in self.eos_ids:
                if rank < width:  # the others are there only so that enough go on
                    self.finished.append((self._score(beam.total, len(beam.tokens)), beam))
            elif len(self.running) < width:
                self.running.append(beam)
        self.finished = sorted(self.finished, key=lambda each: each[0], reverse=True)[:width]
        if self.running and not self._can_improve():
            self.running = []

    def _can_improve(self) -> bool:
        if len(self.finished) < self.params.beam_width:
            return True
        best, tokens = self.running[0].total, len(self.running[0].tokens)
        longest = self.params.max_tokens if self.params.length_penalty > 0 else tokens
        return self._score(best, longest) > self.finished[-1][0]

    def _score(self, total: float, num_tokens: int) -> float:
        return float(total / num_tokens**self.params.length_penalty)


def beam_searches(
    engine: OfflineEngine, call: TextCall, params: BeamSearchParams
) -> Generator[list[Generate], list[Answer], list[BeamSearchOutput]]:
    """Search the outputs of the prompts of *call*; its sampling parameters are not looked at.

    *params* are checked. Raises BadRequest or TooLong for those that this model cannot do.
    """
    eos_ids = engine.resolved.spec.eos_token_ids
    if params.ignore_eos:
        eos_ids = ()
    most = MAX_LOGPROBS - len(eos_ids)
    if params.beam_width > most:
        message = f"beam_width must be at most {most} with {len(eos_ids)} EOS ids"
        raise BadRequest(f"{message}, got {params.beam_width}", param="beam_width")
    searches = [BeamSearch(params, frozenset(eos_ids)) for _ in call.requests]
    step = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=params.beam_width + len(eos_ids),
        ignore_eos=True,
        detokenize=False,
    )
    prompts: list[list[int]] = []
    while any(search.running for search in searches):
        requests = [
            _request(request, step, prompts[index] if prompts else None, beam)
            for index, (request, search) in enumerate(zip(call.requests, searches, strict=True))
            for beam in search.running
        ]
        deltas = [_delta(answer) for answer in (yield requests)]
        if not prompts:
            prompts = [delta.prompt_token_ids or [] for delta in deltas]
            _check_lengths(engine.resolved, prompts, params)
        left = iter(deltas)
        for search in searches:
            if search.running:
                search.advance([_candidates(next(left)) for _ in search.running])
    return [
        BeamSearchOutput(
            [_sequence(engine, prompt, score, beam, search) for score, beam in search.finished]
        )
        for prompt, search in zip(prompts, searches, strict=True)
    ]


def _request(
    first: Generate, step: SamplingParams, prompt: list[int] | None, beam: Beam
) -> Generate:
    """Return the request for what follows *beam*; in the first round the prompt is as given."""
    return Generate(
        0,
        0.0,
        first.prompts if prompt is None else [[*prompt, *beam.tokens]],
        step,
        chat=first.chat if prompt is None else None,
        return_token_ids=True,
        cache_salt=first.cache_salt,
    )


def _check_lengths(resolved: Resolved, prompts: list[list[int]], params: BeamSearchParams) -> None:
    for index, prompt in enumerate(prompts):
        if len(prompt) + params.max_tokens > resolved.max_model_len:
            raise TooLong(
                f"prompt {index}: {len(prompt)} tokens and max_tokens {params.max_tokens} exceed "
                f"the {resolved.max_model_len} of the model",
                param="max_tokens",
            )


def _delta(answer: Answer) -> Delta:
    if isinstance(answer, Failed):
        raise Internal(answer.message)
    assert isinstance(answer, list), "text was asked for"
    return answer[0]


def _candidates(delta: Delta) -> list[tuple[int, Logprob]]:
    assert delta.logprobs is not None, "they were asked for"
    [entry] = delta.logprobs
    return [
        (token_id, Logprob(logprob, rank, token))
        for rank, (token_id, token, _, logprob) in enumerate(entry.top, 1)
    ]


def _sequence(
    engine: OfflineEngine, prompt: list[int], score: float, beam: Beam, search: BeamSearch
) -> BeamSearchSequence:
    stopped = beam.tokens[-1] in search.eos_ids
    shown = beam.tokens
    if stopped and not search.params.include_stop_str_in_output:
        shown = shown[:-1]
    tokens = [*prompt, *shown]
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=[{t: e} for t, e in zip(beam.tokens, beam.logprobs, strict=True)],
        cum_logprob=beam.total,
        score=score,
        text=engine.detokenize(tokens),
        finish_reason="stop" if stopped else "length",
        stop_reason=beam.tokens[-1] if stopped else None,
    )
