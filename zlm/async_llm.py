"""``AsyncLLM``: an engine of its own for an application with an event loop.

    async with AsyncLLM(model="...") as llm:
        async for output in llm.generate("The capital of France is", params):
            ...

It is ``LLM`` without turns: any number of requests run at once and share the engine's steps. The
sockets are watched by the caller's loop, on which prompts are tokenized and outputs put together,
too; starting and stopping, which take seconds, are done in a thread. Owns the engine's life, and
who waits for what; calls are made and answered by the same parts as those of ``LLM``.
"""

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Self, TypeVar, Unpack

from zlm import offline_calls, offline_pooling
from zlm.beam_search import beam_searches
from zlm.config import Resolved
from zlm.errors import Internal, Overloaded, ZlmError
from zlm.messages import Failed, Generate, Pool
from zlm.metrics import EngineStats
from zlm.offline import WATCH_MS, Answer, News, OfflineEngine, Pending, as_error
from zlm.offline_calls import Call, ChatOptions, TextCall
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
from zlm.prompts import ChatMessage, Prompt
from zlm.sampling_params import BeamSearchParams, SamplingParams

Asked = TypeVar("Asked", Generate, Pool)
Out = TypeVar("Out")


class AsyncLLM:
    """A model in child processes of its own, for one event loop.

    The keywords are those of ``EngineOptions``. ``start`` and ``stop``, or ``async with``, begin
    and end the processes; calls raise Internal when there are none, or when one has died.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        self._config = config_of(model, options)
        self._running: OfflineEngine | None = None
        self._finalizer: Callable[[], object] = lambda: None
        self._asleep = False
        self._descriptors: tuple[int, ...] = ()  # those that the loop watches
        self._watch: asyncio.TimerHandle | None = None  # while requests are open
        self._changing = asyncio.Lock()  # starting or stopping

    # ------------------------------------------------------------------------------- its life

    async def start(self) -> None:
        """Bring the engine up; do nothing if it is."""
        async with self._changing:
            if self._running is not None and self._running.failure is None:
                return
            loop = asyncio.get_running_loop()
            starting = asyncio.ensure_future(
                asyncio.to_thread(OfflineEngine, self._config, loop.call_soon_threadsafe)
            )
            try:
                engine = await asyncio.shield(starting)
            except asyncio.CancelledError:
                starting.add_done_callback(_close_unwanted)
                raise
            self._running, self._asleep = engine, False
            self._finalizer = weakref.finalize(self, engine.close)
            self._descriptors = engine.descriptors
            for descriptor in self._descriptors:
                loop.add_reader(descriptor, self._pump)
            self._pump()  # the edge of what came before they were watched

    async def stop(self) -> None:
        """End the child processes and free all they have; what is open ends with an error."""
        async with self._changing:
            if self._running is None:
                return
            self._unwatch()
            self._running = None
            await asyncio.to_thread(self._finalizer)

    async def sleep(self, level: int = 1) -> None:
        """Free all of the engine's memory until ``wake_up``; as ``LLM.sleep``."""
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level}")
        await self.stop()
        self._asleep = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring the engine up after ``sleep``, all of it whatever *tags* (vLLM's) name."""
        await self.start()

    async def is_sleeping(self) -> bool:
        """Return whether ``sleep`` was called and ``wake_up`` was not."""
        return self._asleep

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # ----------------------------------------------------------------------------------- text

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the continuation of one prompt as it comes.

        Each output holds what ``sampling_params.output_kind`` says: all so far, what is new, or
        the end alone. ``request_id`` is for the caller: it comes back in the outputs. Closing the
        generator, which leaving the loop or cancelling the task does, stops the work.

        Raises BadRequest, TooLong or Internal.
        """
        call = offline_calls.generate(self._resolved, [prompt], sampling_params, priority)
        return self._stream(call, request_id)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer to one conversation as it comes, as ``generate`` does."""
        resolved = self._resolved
        call = offline_calls.chat(resolved, [messages], sampling_params, priority, options)
        return self._stream(call, request_id)

    async def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
    ) -> list[BeamSearchOutput]:
        """Return the likeliest outputs that are found for each prompt; as ``LLM.beam_search``."""
        call = offline_calls.generate(self._resolved, prompts, SamplingParams(), None)
        given = offline_calls.checked(params, "params", BeamSearchParams)
        rounds = beam_searches(self._engine, call, given)
        answers = None
        while True:
            try:
                asked = next(rounds) if answers is None else rounds.send(answers)
            except StopIteration as ended:
                return list(ended.value)
            answers = await self._run(self._engine.numbered(asked))

    # -------------------------------------------------------------------------------- vectors

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of every prompt; as ``LLM.embed``."""
        return await self._answers(
            offline_pooling.embed(self._resolved, prompts, pooling_params, truncate_prompt_tokens)
        )

    async def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the pooled vector of every prompt; as ``LLM.encode``."""
        return await self._answers(
            offline_pooling.encode(prompts, pooling_params, truncate_prompt_tokens, pooling_task)
        )

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of a classifier's labels for every prompt, in order."""
        return await self._answers(
            offline_pooling.classify(
                self._resolved, prompts, pooling_params, truncate_prompt_tokens
            )
        )

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score one text against each of several, or as many against as many."""
        return await self._answers(
            offline_pooling.score(
                self._resolved, data_1, data_2, pooling_params, truncate_prompt_tokens
            )
        )

    # ------------------------------------------------------------------------------ the engine

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's defaults (its generation_config.json), for the caller to change."""
        return offline_calls.default_params(self._resolved)

    def stats(self) -> EngineStats:
        """Return the engine's report: counters since it started, and gauges."""
        return self._engine.stats()

    @property
    def _resolved(self) -> Resolved:
        return self._engine.resolved

    @property
    def _engine(self) -> OfflineEngine:
        """The engine that runs; raises Overloaded or Internal if there is none."""
        if self._asleep:
            raise Overloaded("the model sleeps: await wake_up() first")
        if self._running is None:
            raise Internal("there is no engine: use 'async with', or await start() first")
        return self._running

    async def _stream(
        self, call: TextCall, name: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        engine = self._engine
        [request] = engine.numbered(call.requests)
        request = offline_calls.streamed(request)
        answer = call.answer(0, request, engine)
        arrived = asyncio.Event()

        def take(news: News) -> None:
            answer.take(news)
            arrived.set()

        self._open(engine, request, take)
        try:
            is_over = False
            while not is_over:
                arrived.clear()
                if not answer.has_news:
                    await arrived.wait()
                    continue
                output = answer.news()
                is_over = output.finished
                if name is not None:
                    output.request_id = name
                yield output
        finally:
            engine.close_request(request.request_id)

    async def _answers(self, call: Call[Asked, Out]) -> list[Out]:
        requests = self._engine.numbered(call.requests)
        return call.outputs(requests, await self._run(requests))

    async def _run(self, requests: Sequence[Generate | Pool]) -> list[Answer]:
        """Answer *requests*, in their order; raises BadRequest for the first that is refused."""
        engine, all_ended, left = self._engine, asyncio.Event(), len(requests)

        def end_one() -> None:
            nonlocal left
            left -= 1
            if not left:
                all_ended.set()

        pending = [Pending(request, end_one) for request in requests]
        try:
            for index, (request, each) in enumerate(zip(requests, pending, strict=True)):
                self._open(engine, request, each.take)
                if isinstance(each.answer, Failed):
                    raise as_error(each.answer, f"prompt {index}: ")
            if left:
                await all_ended.wait()
        finally:
            for request in requests:
                engine.close_request(request.request_id)
        return [each.answer for each in pending if each.answer is not None]

    # -------------------------------------------------------------------------------- the loop

    def _open(
        self, engine: OfflineEngine, request: Generate | Pool, take: Callable[[News], None]
    ) -> None:
        engine.open(request, take)
        if self._watch is None:
            self._watch_later()

    def _pump(self) -> None:
        """Handle what the children have sent; who waits for a request is told of their death."""
        engine = self._running
        if engine is None:
            return
        try:
            engine.pump(0)
        except ZlmError:
            self._unwatch()

    def _watch_later(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(WATCH_MS / 1000, self._look)

    def _look(self) -> None:
        """See whether the children live, while anybody waits for them."""
        self._watch = None
        self._pump()
        if self._running is not None and self._running.num_open:
            self._watch_later()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for descriptor in self._descriptors:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._descriptors = ()


def _close_unwanted(starting: "asyncio.Future[OfflineEngine]") -> None:
    """Close an engine that nobody waits for any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
