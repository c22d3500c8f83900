"""The tokenizer's core: requests in, submissions to the engine out; its tokens in, text out.

Used by the tokenizer process and, in the caller's own process, by the offline ``LLM``. It has no
sockets and no clock: it takes messages and calls two functions with messages.

    Generate ─ render ─ encode ─ check ─→ Submit (one a prompt)      ─→ engine
    StepOutput ─ detokenize ─ stop strings ─ log-probabilities ─→ Deltas ─→ front end

Owns, from Generate to the end: the requests, their sequences' ids, and the text state of each. A
request ends in exactly one way: every choice has had a Delta with a finish reason, or one Failed
was sent, or it was cancelled. What the engine still says of a sequence that is over here (stopped
by a stop string, failed, cancelled) is dropped. An unforeseen exception ends the request it
concerns with a 500, is logged, and touches no other.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial

import msgspec
import numpy as np

from zlm.config import Resolved
from zlm.errors import BadRequest, Internal, Overloaded, ZlmError
from zlm.messages import (
    OWNER_SHIFT,
    RUNNING,
    Abort,
    Cancel,
    Delta,
    Deltas,
    Detokenize,
    DetokenizedText,
    EngineReady,
    Failed,
    Generate,
    Grammar,
    Pool,
    Pooled,
    SequenceError,
    StepOutput,
    Submit,
    TokenBytes,
    Tokenize,
    TokenLogprob,
    Tokens,
    first_id,
)
from zlm.tokenizer.admission import Admission, Admitted
from zlm.tokenizer.chat_template import ChatRenderer
from zlm.tokenizer.choice import Choice, Prompt
from zlm.tokenizer.detokenize import detokenizer
from zlm.tokenizer.grammar_checks import GrammarChecks, token_bytes
from zlm.tokenizer.grammars import grammar_of_request
from zlm.tokenizer.load import load_vocabulary
from zlm.tokenizer.logprobs import entries_by_row, entry, text_offsets
from zlm.tokenizer.no_vocabulary import NoVocabulary
from zlm.tokenizer.output_formats import OutputFormats, OutputPlan, unread_grammar
from zlm.tokenizer.pooling import PoolingRequests, unserved
from zlm.tokenizer.sampling import check_ids, int32
from zlm.tokenizer.token_table import TokenTable

logger = logging.getLogger(__name__)

ToFrontend = Deltas | Failed | Tokens | DetokenizedText | Pooled


@dataclass(slots=True)
class _Request:
    """What is open of one request."""

    seq_ids: set[int] = field(default_factory=set)
    prompts: list[Prompt] = field(default_factory=list)


class TokenizerCore:
    """Handles every message a tokenizer gets. Not for use from several threads at once."""

    def __init__(
        self,
        resolved: Resolved,
        owner: int,
        *,
        to_engine: Callable[[Submit | Abort | TokenBytes], None],
        to_frontend: Callable[[int, ToFrontend], None],
        run_later: Callable[[Callable[[], None]], object] | None = None,
        incarnation: int = 0,
    ) -> None:
        """Load the vocabulary; *owner* is this tokenizer's index, part of every sequence id, as is
        *incarnation*, the number of those that were before it.

        *to_frontend* gets the index of the front end (``request_id >> OWNER_SHIFT``) and the
        message. *run_later* calls a function on the caller's thread, from any other: without it a
        new grammar is waited for. Raises ModelError or ConfigError when the tokenizer cannot be
        loaded.
        """
        server, model = resolved.config.server, resolved.config.model
        self.vocabulary = (
            NoVocabulary()
            if model.skip_tokenizer_init
            else load_vocabulary(resolved.tokenizer_path, chat_template=model.chat_template)
        )
        self.renderer = ChatRenderer(
            self.vocabulary,
            seconds=server.limits.template_seconds,
            allow_special_tokens=server.allow_special_tokens_in_content,
            pools=resolved.spec.pooling is not None,
            trusts_requests=server.trust_request_chat_template,
        )
        if resolved.config.model.chat_template is not None:
            self.renderer.check_template()
        self.steps = 0  # messages of the engine taken in
        self._resolved = resolved
        self._admission = Admission(resolved, owner, self.vocabulary, self.renderer)
        self._formats = OutputFormats(
            self.vocabulary,
            self.renderer,
            tool_parser=server.tool_call_parser,
            reasoning_parser=server.reasoning_parser,
            end_ids=resolved.spec.eos_token_ids,
        )
        # A model without text has no use for the table, nor need its decoder be one we know.
        self._table = TokenTable(NoVocabulary() if resolved.spec.pooling else self.vocabulary)
        eos_ids = resolved.spec.eos_token_ids
        self._token_bytes = cache(lambda: token_bytes(self.vocabulary, self._table, eos_ids))
        self._grammars = GrammarChecks(
            self._token_bytes, resolved.spec.vocab_size, server.limits.grammar_seconds, run_later
        )
        self._checking: set[int] = set()  # requests that wait for the check of their grammar
        self._told_tokens = False  # to the engine
        self._to_engine = to_engine
        self._to_frontend = to_frontend
        self._next_seq_id = first_id(owner, incarnation)
        self._engine_lost: str | None = None  # why there is none to submit to
        self._requests: dict[int, _Request] = {}
        self._choices: dict[int, Choice] = {}  # by sequence id; only those still running
        self._copies: dict[int, int] = {}  # sequences that stand for several equal choices
        self._pooling: PoolingRequests | None = None  # of a model that gives vectors, not text
        if resolved.spec.pooling is not None:
            self._pooling = PoolingRequests(
                resolved,
                resolved.spec.pooling,
                self._next_seq_id,
                self.vocabulary,
                submit=to_engine,
                answer=self._answer_pooled,
                chat_ids=lambda chat, limit: self._admission.chat_ids(chat, limit=limit),
            )

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        waiting = len(self._requests) + len(self._checking)
        return waiting + (len(self._pooling) if self._pooling is not None else 0)

    def handle(
        self, message: Generate | Pool | Cancel | Tokenize | Detokenize | StepOutput | EngineReady
    ) -> None:
        """Take in one message. Never raises for what a request holds."""
        match message:
            case StepOutput():
                self._take_output(message)
            case Generate():
                self._guard(message.request_id, self._generate, message)
            case Pool():
                self._guard(message.request_id, self._pool, message)
            case Cancel():
                self._abort(self._forget(message.request_id))
            case Tokenize():
                self._guard(message.request_id, self._tokenize, message)
            case Detokenize():
                self._guard(message.request_id, self._detokenize, message)
            case EngineReady():
                self._engine_lost = None
                self._admission.max_sequence_tokens = message.max_sequence_tokens
                self._told_tokens = False  # the engine may be another
                if self._pooling is not None:
                    self._pooling.max_sequence_tokens = message.max_sequence_tokens

    def lose_engine(self, reason: str) -> None:
        """End every request that the engine worked on; until EngineReady none can be submitted."""
        self._engine_lost = reason
        pooling = [] if self._pooling is None else self._pooling.open_requests()
        for request_id in [*self._requests, *pooling]:
            self._fail(request_id, _lost(reason))

    def lose_frontend(self, index: int) -> None:
        """Drop all requests of a front end that is dead, and stop the work on them."""
        pooling = [] if self._pooling is None else self._pooling.open_requests()
        for request_id in [*self._requests, *self._checking, *pooling]:
            if request_id >> OWNER_SHIFT == index:
                self._abort(self._forget(request_id))

    def close(self) -> None:
        """End what was started for rendering and for grammars."""
        self.renderer.close()
        self._grammars.close()

    # ------------------------------------------------------------------ requests

    def _pool(self, message: Pool) -> None:
        if self._pooling is None:
            raise unserved(generates=True)
        self._check_engine()
        self._pooling.start(message)

    def _check_engine(self) -> None:
        if self._engine_lost is not None:
            raise _lost(self._engine_lost)

    def _answer_pooled(self, answer: Pooled) -> None:
        self._to_frontend(answer.request_id >> OWNER_SHIFT, answer)

    def _generate(self, message: Generate) -> None:
        if self._pooling is not None:
            raise unserved(generates=False)
        admitted = self._admission.admit(message)
        engine_prompt_logprobs = admitted.sampling.prompt_logprobs >= 0
        if message.params.max_tokens == 0 and not engine_prompt_logprobs:
            self._answer_without_engine(message, admitted)
            return
        grammar = grammar_of_request(message)
        if grammar is None:
            self._start(message, admitted=admitted)
            return
        if self._resolved.config.model.skip_tokenizer_init:
            raise BadRequest("structured output needs a tokenizer", param="structured_outputs")
        self._checking.add(message.request_id)
        self._grammars.check(grammar, partial(self._checked, message, admitted, grammar))

    def _checked(
        self, message: Generate, admitted: Admitted, grammar: Grammar, error: ZlmError | None
    ) -> None:
        """Go on with a request whose *grammar* was checked, unless it was cancelled meanwhile."""
        if message.request_id not in self._checking:
            return
        self._checking.discard(message.request_id)
        if error is not None:
            wanted = None if grammar is message.grammar else message.params.structured_outputs
            error.param = error.param or ("tools" if wanted is None else wanted.source)
            self._fail(message.request_id, error)
            return
        start = partial(self._start, admitted=admitted, grammar=grammar)
        self._guard(message.request_id, start, message)

    def _start(
        self, message: Generate, *, admitted: Admitted, grammar: Grammar | None = None
    ) -> None:
        """Hand an admitted request to the engine."""
        self._check_engine()
        n, skip = message.params.n, message.params.skip_special_tokens
        if grammar is not None and not self._told_tokens:
            self._to_engine(self._token_bytes())
            self._told_tokens = True
        # Without output all samples of a prompt are equal: one sequence stands for them.
        copies, samples = (n, 1) if message.params.max_tokens == 0 else (1, n)
        plan = self._formats.plan(message, admitted.prompts[0].token_ids, grammar=grammar)
        grammar = unread_grammar(message, grammar) if plan is None else plan.grammar
        request = self._requests[message.request_id] = _Request()
        submits = []
        for number, prompt in enumerate(admitted.prompts):
            if admitted.sampling.prompt_logprobs >= 0:
                prompt.logprobs.append(entry(self._table, prompt.token_ids[0], None, []))
            if admitted.options.echo_logprobs:
                prompt.offsets = text_offsets(self._table, prompt.token_ids, prompt.text, skip=skip)
            seq_id = self._next_seq_id
            self._next_seq_id += samples
            for sample in range(samples):
                choice = self._choice(message, admitted, prompt, number * n + sample, plan)
                self._choices[seq_id + sample] = choice
                request.seq_ids.add(seq_id + sample)
            if copies > 1:
                self._copies[seq_id] = copies
            submit = self._submit(message, admitted, number, seq_id, samples)
            submits.append(msgspec.structs.replace(submit, grammar=grammar))
        for submit in submits:
            self._to_engine(submit)

    def _choice(
        self,
        message: Generate,
        admitted: Admitted,
        prompt: Prompt,
        index: int,
        plan: OutputPlan | None = None,
    ) -> Choice:
        params = message.params
        text = None
        if params.detokenize and not self._resolved.config.model.skip_tokenizer_init:
            text = detokenizer(
                self._table,
                skip_special_tokens=params.skip_special_tokens,
                continues=admitted.continues,
                shown=frozenset() if plan is None else plan.shown,
            )
        parts = None if plan is None or text is None else plan.parts()
        return Choice(message.request_id, index, prompt, text, admitted.options, parts)

    def _submit(
        self, message: Generate, admitted: Admitted, number: int, seq_id: int, samples: int
    ) -> Submit:
        params = message.params
        return Submit(
            seq_id=seq_id,
            arrival=message.arrival,
            token_ids=int32(admitted.prompts[number].token_ids),
            max_tokens=admitted.max_tokens[number],
            sampling=msgspec.structs.replace(admitted.sampling, seed=admitted.seeds[number]),
            n=samples,
            stop_token_ids=params.stop_token_ids or [],
            ignore_eos=params.ignore_eos,
            priority=message.priority,
            cache_salt=message.cache_salt.encode(),
        )

    def _answer_without_engine(self, message: Generate, admitted: Admitted) -> None:
        """Answer an echo of the prompts alone."""
        deltas: list[Delta] = []
        for number, prompt in enumerate(admitted.prompts):
            choice = self._choice(message, admitted, prompt, number * message.params.n)
            choice.finish("length")
            deltas += _copied(choice.delta(), message.params.n)
        self._to_frontend(message.request_id >> OWNER_SHIFT, Deltas(deltas))

    def _tokenize(self, message: Tokenize) -> None:
        if message.chat is not None:
            ids = self._admission.chat_ids(message.chat)
        else:
            add = message.add_special_tokens
            ids = self._admission.text_ids(message.prompt, add_special_tokens=add)
        strings = None
        if message.return_token_strings:
            strings = [self.vocabulary.token(token_id) or "" for token_id in ids]
        answer = Tokens(message.request_id, ids, strings)
        self._to_frontend(message.request_id >> OWNER_SHIFT, answer)

    def _detokenize(self, message: Detokenize) -> None:
        check_ids("tokens", message.token_ids, self._resolved.spec.vocab_size)
        text = self.vocabulary.decode(message.token_ids, skip_special_tokens=False)
        answer = DetokenizedText(message.request_id, text)
        self._to_frontend(message.request_id >> OWNER_SHIFT, answer)

    # ------------------------------------------------------------------ the engine's news

    def _take_output(self, message: StepOutput) -> None:
        self.steps += 1
        if self._pooling is not None:
            self._take_pooled(self._pooling, message)
            return
        seq_ids = np.frombuffer(message.seq_ids, dtype="<i8").tolist()
        token_ids = np.frombuffer(message.token_ids, dtype="<i4").tolist()
        finishes = np.frombuffer(message.finish, dtype="u1").tolist()
        self._take_prompt_news(message, seq_ids)
        logprobs: dict[int, list[TokenLogprob]] = {}
        if message.logprobs is not None:
            logprobs = entries_by_row(message.logprobs, self._table)
        news: dict[int, list[Delta]] = {}
        stopped: list[int] = []
        failed: list[tuple[int, Exception]] = []
        for row, seq_id in enumerate(seq_ids):
            choice = self._choices.get(seq_id)
            if choice is None:
                continue
            token_id, finish = token_ids[row], finishes[row]
            try:
                if choice.is_plain and finish == RUNNING and token_id >= 0:
                    delta = choice.next_delta(token_id)
                    if delta is not None:
                        news.setdefault(choice.request_id >> OWNER_SHIFT, []).append(delta)
                    continue
                entries = logprobs.get(row)
                choice.advance(token_id, finish, entries[0] if entries else None)
                self._collect(seq_id, choice, news)
            except Exception as error:
                stopped += self._forget(choice.request_id)
                failed.append((choice.request_id, error))
                continue
            if choice.finish_reason is not None and finish == RUNNING:
                stopped.append(seq_id)
        self._abort(stopped)
        for frontend, deltas in news.items():
            self._to_frontend(frontend, Deltas(deltas))
        for request_id, fault in failed:
            self._fail(request_id, fault)
        for sequence_error in message.errors:
            self._take_error(sequence_error)

    def _take_pooled(self, pooling: PoolingRequests, message: StepOutput) -> None:
        pooling.take(message)
        for error in message.errors:
            request_id = pooling.request_of(error)
            if request_id is not None:
                others = [i for i in pooling.forget(request_id) if i != error.seq_id]
                self._abort(others)
                self._tell_error(request_id, error)

    def _take_prompt_news(self, message: StepOutput, seq_ids: list[int]) -> None:
        """Take in what a step says of prompts: cached tokens, times, log-probabilities."""
        for row, cached in message.cached:
            choice = self._choices.get(seq_ids[row])
            if choice is not None:
                choice.num_cached_tokens = cached
        for row, started, first in message.times:
            choice = self._choices.get(seq_ids[row])
            if choice is not None:
                choice.times = started, first
        if message.prompt_logprobs is None:
            return
        for row, entries in entries_by_row(message.prompt_logprobs, self._table).items():
            choice = self._choices.get(seq_ids[row])
            if choice is not None:
                choice.prompt.take_logprobs(entries)

    def _collect(self, seq_id: int, choice: Choice, news: dict[int, list[Delta]]) -> None:
        delta = choice.delta()
        finished = choice.finish_reason is not None
        if delta is not None:
            copies = self._copies.get(seq_id, 1)
            news.setdefault(choice.request_id >> OWNER_SHIFT, []).extend(_copied(delta, copies))
        if finished:
            self._choices.pop(seq_id)
            self._copies.pop(seq_id, None)
            request = self._requests[choice.request_id]
            request.seq_ids.discard(seq_id)
            if not request.seq_ids:
                del self._requests[choice.request_id]

    def _take_error(self, error: SequenceError) -> None:
        choice = self._choices.get(error.seq_id)
        if choice is None:
            return
        others = self._forget(choice.request_id)
        self._abort(seq_id for seq_id in others if seq_id != error.seq_id)
        self._tell_error(choice.request_id, error)

    def _tell_error(self, request_id: int, error: SequenceError) -> None:
        failed = Failed(
            request_id,
            error.status,
            error.error_type,
            error.message,
            code=error.code,
            retry_after_seconds=error.retry_after_seconds,
        )
        self._to_frontend(request_id >> OWNER_SHIFT, failed)

    # ------------------------------------------------------------------ the ends of requests

    def _guard(self, request_id: int, action: Callable, message: object) -> None:
        try:
            action(message)
        except Exception as error:
            self._fail(request_id, error)

    def _fail(self, request_id: int, error: Exception) -> None:
        """End a request with *error*, which becomes a 500 if it is not one of ours."""
        self._abort(self._forget(request_id))
        if not isinstance(error, ZlmError):
            logger.error("request %x failed", request_id, exc_info=error)
            error = Internal("the server failed to process this request")
        failed = Failed(
            request_id,
            error.status,
            error.type,
            error.message,
            code=error.code,
            param=error.param,
            retry_after_seconds=error.retry_after_seconds,
        )
        self._to_frontend(request_id >> OWNER_SHIFT, failed)

    def _forget(self, request_id: int) -> list[int]:
        """Drop a request and return its sequences that the engine still works on."""
        if self._pooling is not None:
            return self._pooling.forget(request_id)
        self._checking.discard(request_id)
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        for seq_id in request.seq_ids:
            self._choices.pop(seq_id, None)
            self._copies.pop(seq_id, None)
        return sorted(request.seq_ids)

    def _abort(self, seq_ids: Iterable[int]) -> None:
        seq_ids = list(seq_ids)
        if seq_ids and self._engine_lost is None:
            self._to_engine(Abort(seq_ids))


def _lost(reason: str) -> ZlmError:
    return Overloaded(f"the engine is being restarted, try again ({reason})")


def _copied(delta: Delta | None, copies: int) -> list[Delta]:
    """Return *delta* for *copies* choices in a row."""
    if delta is None:
        return []
    return [msgspec.structs.replace(delta, index=delta.index + k) for k in range(copies)]
