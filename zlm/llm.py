"""``LLM``: the offline interface, in vLLM's names, over the same engine the server uses.

Owns the engine's life and whose turn it is to use it. What calls ask and return is made in
``zlm.offline_calls``, ``zlm.offline_pooling`` and ``zlm.beam_search``; ``zlm.async_llm`` has the
same for an event loop.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar, Unpack

from zlm import offline_calls, offline_pooling
from zlm.beam_search import beam_searches
from zlm.errors import Overloaded
from zlm.messages import Generate, Pool
from zlm.metrics import EngineStats
from zlm.offline import OfflineEngine, deferred_interrupt
from zlm.offline_calls import Call, ChatOptions, Params, Priority, TextCall
from zlm.offline_options import EngineOptions, config_of
from zlm.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from zlm.pooling_params import PoolingParams
from zlm.progress import ProgressBar
from zlm.prompts import ChatMessage, Prompt
from zlm.sampling_params import BeamSearchParams, SamplingParams

Asked = TypeVar("Asked", Generate, Pool)
Out = TypeVar("Out")
Progress = bool | Callable[..., Any]  # as ``use_tqdm``: whether to show a bar, or what makes one


class LLM:
    """A model in child processes of its own, driven from this process.

    The keywords are those of ``EngineOptions``; errors name the server's flag of the same name.

    Usable from any thread (calls take turns), several at once in a process, and as a context
    manager. ``shutdown``, the end of the ``with`` block, garbage collection or the end of the
    interpreter, whichever comes first, ends the children.

    Raises ConfigError for keywords that contradict each other, ModelError for a checkpoint that
    cannot be run, and Internal when a child dies while starting.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        self._config = config_of(model, options)
        self._lock = threading.Lock()
        self._holder = 0  # the thread whose turn it is; 0: nobody's
        self._dropped: deque[int] = deque()  # requests of streams that were left
        self._asleep = False
        self._open()

    # ------------------------------------------------------------------------------- its life

    def start(self) -> None:
        """Bring the engine up again after ``stop``, ``sleep`` or its death; else do nothing."""
        with self._lock:
            if self._engine.failure is not None:
                self._open()

    def stop(self) -> None:
        """End the child processes and free all they have; ``start`` brings them up again.

        Calls raise Internal until then. Calling it again does nothing.
        """
        if self._holder == threading.get_ident():  # a signal handler in the middle of a call
            self._finalizer()
            return
        with self._lock:
            self._finalizer()

    shutdown = stop

    def sleep(self, level: int = 1) -> None:
        """Free all of the engine's memory until ``wake_up``; calls raise Overloaded until then.

        level: vLLM's; weights are read anew from the disk's cache at either.
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level}")
        self.stop()
        self._asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring the engine up after ``sleep``, all of it whatever *tags* (vLLM's) name."""
        self.start()

    def is_sleeping(self) -> bool:
        """Return whether ``sleep`` was called and ``wake_up`` was not."""
        return self._asleep

    def _open(self) -> None:
        self._engine = OfflineEngine(self._config)
        self._asleep = False
        self._dropped.clear()
        self._finalizer = weakref.finalize(self, self._engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ----------------------------------------------------------------------------------- text

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs stand in the order of the prompts.

        A prompt is a text, a list of ids, or a dict with ``prompt`` or ``prompt_token_ids`` (and
        ``cache_salt``). ``sampling_params`` is one for all, or one for each; None takes the model's
        defaults. ``priority`` (lower runs earlier) counts under ``scheduling_policy="priority"``.

        Raises BadRequest or TooLong, naming the prompt's index, and ends what runs of the others by
        then; Internal when the engine has died. KeyboardInterrupt ends what runs and leaves the
        engine usable.
        """
        call = offline_calls.generate(self._engine.resolved, prompts, sampling_params, priority)
        return self._answers(call.of(self._engine), use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        priority: Priority = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of lists).

        The rest is as in ``generate``.
        """
        resolved = self._engine.resolved
        call = offline_calls.chat(resolved, messages, sampling_params, priority, options)
        return self._answers(call.of(self._engine), use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the continuation of one prompt as it comes; closing the iterator stops the work.

        Each output holds what ``sampling_params.output_kind`` says: all so far, or what is new.
        Other calls may be made while it is open. Raises as ``generate`` does, at the first step.
        """
        resolved = self._engine.resolved
        return self._stream(offline_calls.generate(resolved, [prompt], sampling_params, priority))

    def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[RequestOutput]:
        """Yield the answer to one conversation as it comes, as ``stream`` does."""
        resolved = self._engine.resolved
        return self._stream(
            offline_calls.chat(resolved, [messages], sampling_params, priority, options)
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | None = None,
        *,
        use_tqdm: Progress = False,
    ) -> list[BeamSearchOutput]:
        """Return the ``params.beam_width`` likeliest outputs that are found for each prompt.

        Raises as ``generate`` does, and if there are no params.
        """
        call = offline_calls.generate(self._engine.resolved, prompts, SamplingParams(), None)
        given = offline_calls.checked(params, "params", BeamSearchParams)
        rounds = beam_searches(self._engine, call, given)
        with ProgressBar(given.max_tokens, use_tqdm) as bar, self._turn() as engine:
            answers = None
            while True:
                try:
                    asked = next(rounds) if answers is None else rounds.send(answers)
                except StopIteration as ended:
                    return list(ended.value)
                answers = engine.run(engine.numbered(asked), lambda *_: None)
                bar.advance(1, len(asked))

    # -------------------------------------------------------------------------------- vectors

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of every prompt; the outputs stand in the order of the prompts.

        Raises BadRequest, naming the prompt's index, for what cannot be done, and for a model that
        gives no vectors (``runner="pooling"`` makes an embedding model of a model of text).
        """
        call = offline_pooling.embed(
            self._engine.resolved, prompts, pooling_params, truncate_prompt_tokens
        )
        return self._answers(call, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the pooled vector of every prompt, of length 1 only if the parameters say so.

        pooling_task: as ``PoolingParams.task``; with token_embed there is a vector for each token.
        """
        call = offline_pooling.encode(prompts, pooling_params, truncate_prompt_tokens, pooling_task)
        return self._answers(call, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of a classifier's labels for every prompt, in order."""
        call = offline_pooling.classify(
            self._engine.resolved, prompts, pooling_params, truncate_prompt_tokens
        )
        return self._answers(call, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
    ) -> list[ScoringRequestOutput]:
        """Score one text against each of several, or as many against as many.

        A cross-encoder reads both texts at once; of any other embedding model the score is the
        cosine of the two vectors.
        """
        call = offline_pooling.score(
            self._engine.resolved, data_1, data_2, pooling_params, truncate_prompt_tokens
        )
        return self._answers(call, use_tqdm)

    # ------------------------------------------------------------------------------ the engine

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's defaults (its generation_config.json), for the caller to change."""
        return offline_calls.default_params(self._engine.resolved)

    def stats(self) -> EngineStats:
        """Return the engine's report: counters since it started, and gauges."""
        with self._lock:
            return self._engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget what is kept of prompts that were computed; return True, as vLLM does."""
        with self._turn() as engine:
            engine.reset_prefix_cache()
        return True

    # ------------------------------------------------------------------------------------ turns

    @contextmanager
    def _turn(self) -> Iterator[OfflineEngine]:
        """Wait for the engine and have it for this thread alone."""
        with self._lock:
            if self._asleep:
                raise Overloaded("the model sleeps: call wake_up() first")
            self._holder = threading.get_ident()
            try:
                yield self._engine
            finally:
                self._holder = 0
        self._close_dropped()

    def _answers(self, call: Call[Asked, Out], use_tqdm: Progress) -> list[Out]:
        with self._turn() as engine:
            requests = engine.numbered(call.requests)
            with ProgressBar(len(requests), use_tqdm) as bar:
                answers = engine.run(requests, bar.advance)
            return call.outputs(requests, answers)

    def _stream(self, call: TextCall) -> Iterator[RequestOutput]:
        with self._turn() as engine:
            [request] = engine.numbered(call.requests)
            request = offline_calls.streamed(request)
            answer = call.answer(0, request, engine)
            engine.open(request, answer.take)
        try:
            is_over = False
            while not is_over:
                with self._turn(), deferred_interrupt() as interrupt:
                    while not answer.has_news:
                        interrupt.check()
                        engine.pump()
                output = answer.news()
                is_over = output.finished
                yield output
        finally:
            self._dropped.append(request.request_id)
            self._close_dropped()

    def _close_dropped(self) -> None:
        """Close the requests of streams that were left, unless somebody else has the turn.

        That one does it afterwards: a garbage collector that closes a stream must never wait.
        """
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    self._engine.close_request(self._dropped.popleft())
            finally:
                self._lock.release()
