"""``AsyncLLM``: many requests at once on the caller's loop, left ones, deaths, start and stop."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from zlm import (
    AsyncLLM,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from zlm.errors import BadRequest, Internal, Overloaded, TooLong

DELTAS = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
WHOLE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
OPTIONS = {"dtype": "float32", "device": "cpu", "cpu_threads": 1}
SECONDS = 30.0


pytestmark = pytest.mark.asyncio(loop_scope="module")  # an engine is of one loop


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(tiny_path: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(tiny_path, **OPTIONS) as llm:  # type: ignore[misc]
        yield llm


async def joined(llm: AsyncLLM, prompt: str) -> list[int]:
    return [
        token
        async for output in llm.generate(prompt, DELTAS)
        for token in output.outputs[0].token_ids
    ]


async def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def test_many_at_once(llm: AsyncLLM) -> None:
    """Each gets its own tokens, as alone; they run together and leave the loop free."""
    prompts = [f"{i} and {i + 1} are" for i in range(24)]
    alone = [await joined(llm, prompt) for prompt in prompts[:3]]
    steps = llm.stats().steps
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    together = await asyncio.gather(*(joined(llm, prompt) for prompt in prompts))
    ticking.cancel()
    assert together[:3] == alone and all(len(tokens) == 24 for tokens in together)
    assert llm.stats().steps - steps < 24 * 24 / 2
    assert turns > 24
    cumulative = [o async for o in llm.generate(prompts[0], WHOLE, "mine")]
    assert cumulative[-1].outputs[0].token_ids == alone[0]
    assert cumulative[-1].finished and {o.request_id for o in cumulative} == {"mine"}


async def test_a_generator_that_is_left_is_aborted(llm: AsyncLLM) -> None:
    def aborts() -> int:
        return llm.stats().success.get("abort", 0)

    before = aborts()
    async for _ in llm.generate("once", ENDLESS):
        break
    assert await eventually(lambda: aborts() == before + 1)

    async def read() -> None:
        async for _ in llm.generate("twice", ENDLESS):
            started.set()

    started = asyncio.Event()
    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    assert await eventually(lambda: aborts() == before + 2)
    assert llm._engine.num_open == 0
    assert len(await joined(llm, "thrice")) == 24


async def test_refusals_and_other_calls(llm: AsyncLLM) -> None:
    with pytest.raises(TooLong, match="512"):
        await anext(llm.generate([7] * 600, WHOLE))
    with pytest.raises(BadRequest, match="temperature"):
        llm.generate("a", SamplingParams(temperature=9))
    with pytest.raises(BadRequest, match=r"messages\[0\].role must be one of .* mean 'user'"):
        llm.chat([{"role": "usr", "content": "x"}])
    with pytest.raises(BadRequest, match="params must be BeamSearchParams, got None"):
        await llm.beam_search("a")
    with pytest.raises(BadRequest, match="generates text"):
        await llm.encode("a")
    message = [{"role": "user", "content": "hello"}]
    *_, last = [o async for o in llm.chat(message, WHOLE)]
    assert last.prompt is not None and last.prompt.startswith("<|im_start|>user\nhello")
    [found] = await llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=4))
    assert len(found.sequences) == 2
    assert len(await joined(llm, "again")) == 24


async def test_structured_output(llm: AsyncLLM) -> None:
    """Its grammar is checked elsewhere: the answer comes through a callback of the loop."""
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(max_tokens=8, temperature=0, structured_outputs=form)
    answers = [o async for o in llm.generate("a", params)]
    assert answers[-1].outputs[0].text in ("yes", "no")
    params.structured_outputs = StructuredOutputsParams(regex="(a")
    with pytest.raises(BadRequest, match="regex does not compile"):
        await anext(llm.generate("a", params))


async def test_sleep_start_and_death(tiny_path: Path) -> None:
    llm = AsyncLLM(tiny_path, **OPTIONS)  # type: ignore[misc]
    with pytest.raises(Internal, match="async with"):
        llm.generate("a", WHOLE)
    await llm.start()
    before = await joined(llm, "one")
    worker = llm._engine.pid("worker")
    await llm.sleep()
    assert await llm.is_sleeping() and not Path(f"/proc/{worker}").exists()
    with pytest.raises(Overloaded, match="wake_up"):
        llm.generate("a", WHOLE)
    await llm.wake_up()
    assert await joined(llm, "one") == before
    reading = asyncio.create_task(anext(llm.generate("a", SamplingParams(
        max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    ))))  # fmt: skip
    await asyncio.sleep(0)  # it is under way now
    os.kill(llm._engine.pid("worker"), signal.SIGKILL)
    with pytest.raises(Internal, match=r"worker.*SIGKILL"):
        await asyncio.wait_for(reading, SECONDS)
    with pytest.raises(Internal, match="worker"):
        await joined(llm, "one")
    await llm.start()
    assert await joined(llm, "one") == before
    await llm.stop()
    await llm.stop()


async def test_vectors(minilm_path: Path) -> None:
    async with AsyncLLM(minilm_path, device="cpu", cpu_threads=1) as llm:
        one, many = await asyncio.gather(llm.embed("hello"), llm.embed(["hello", "world"] * 8))
        assert one[0].outputs.embedding == pytest.approx(many[0].outputs.embedding, abs=1e-6)
        assert len(many) == 16
        scores = await llm.score("hello", ["hello", "world"])
        assert scores[0].outputs.score == pytest.approx(1.0, abs=1e-5)
        assert scores[1].outputs.score < 0.99
        with pytest.raises(TooLong, match="prompt 1"):
            await llm.embed(["a", "word " * 600])
        with pytest.raises(BadRequest, match="no classification head"):
            await llm.classify("a")
