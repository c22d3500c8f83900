"""The load client: what it counts, what it takes for a failure, and its figures."""

import asyncio
from collections.abc import Callable

import pytest
from client import Load, Samples, figures, percentile, run_level, stream_once, usage_tokens

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
USAGE = b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b'data: {"choices": [{"text": "%b"}]}\n\n' % text.encode()


@pytest.fixture
def answered() -> Callable:
    """Serve *pieces*, one write each, to one request; return what the client saw."""

    async def run(*pieces: bytes, output_tokens: int = 4) -> Samples:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        samples = Samples()
        load = Load("127.0.0.1", port, "m", 3, output_tokens, 1000)
        await stream_once(load, b"POST / HTTP/1.1\r\n\r\n", samples)
        server.close()
        return samples

    return run


async def test_events_and_gaps_are_counted(answered: Callable) -> None:
    samples = await answered(HEAD + event("a"), event("b") + event("c"), event("d"), USAGE, DONE)
    assert samples.errors == []
    assert (samples.events, samples.output_tokens) == (5, 4)
    assert len(samples.first) == len(samples.total) == 1
    assert len(samples.gaps) == 3 and min(samples.gaps) > 0.005
    assert samples.first[0] < samples.total[0]


async def test_an_event_cut_in_two_counts_once(answered: Callable) -> None:
    whole = event("a")
    for cut in range(1, 8):
        samples = await answered(HEAD + whole[:cut], whole[cut:], USAGE, DONE)
        assert samples.events == 2


@pytest.mark.parametrize(
    "pieces",
    [(HEAD + event("a"), USAGE), (HEAD + event("a"), DONE), (b"HTTP/1.1 503 No\r\n\r\n",), ()],
    ids=["no end", "no usage", "refused", "closed"],
)
async def test_an_answer_that_is_not_whole_is_a_failure(
    answered: Callable, pieces: tuple[bytes, ...]
) -> None:
    samples = await answered(*pieces)
    assert len(samples.errors) == 1 and samples.first == []


async def test_fewer_tokens_than_asked_for_are_a_failure(answered: Callable) -> None:
    samples = await answered(HEAD + event("a"), USAGE, DONE, output_tokens=5)
    assert "4 tokens" in samples.errors[0]


def test_a_server_that_is_not_there_is_a_failure() -> None:
    level = run_level(Load("127.0.0.1", 1, "m", 1, 1, 1000), 2, 4)
    assert (level["n"], level["ok"], level["errors"]) == (4, 0, 4)
    assert level["ttft_p50_ms"] is None and level["out_tok_s"] == 0


def test_usage_and_percentiles() -> None:
    assert usage_tokens(b'{"completion_tokens": 12, "x": 1} {"completion_tokens":7}') == 7
    assert usage_tokens(b"nothing") == -1
    assert percentile([], 50) is None
    assert percentile([float(i) for i in range(100)], 99) == 99.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0


def test_what_several_processes_saw_is_put_together() -> None:
    one = Samples([0.1], [1.0], [0.01], 10, 11, [], began=5.0, ended=7.0, cpu=0.5)
    one.merge(Samples([0.3], [2.0], [0.03], 10, 11, ["x"], began=4.0, ended=6.0, cpu=0.25))
    level = figures(Load("h", 1, "m", 8, 10, 100), 2, 3, one)
    assert level["s"] == 3.0 and level["out_tok_s"] == 6.7 and level["client_cpu"] == 0.25
    assert (level["ok"], level["errors"], level["err"]) == (2, 1, "x")
    assert level["ttft_p99_ms"] == 300.0 and level["gap_p50_ms"] == 30.0
