"""What an engine that is full refuses, and what it forgets when told to."""

from driver import Engine


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 5 * number) % 23 + 4 for number in range(length)]


def test_as_many_sequences_wait_as_may_and_no_more() -> None:
    """Free slots count for what they have room for: with none waiting, two of two may come."""
    engine = Engine(max_num_seqs=2, max_waiting_seqs=1)
    for _ in range(3):
        engine.submit(prompt(4), 8)
    assert engine.errors() == []
    engine.submit(prompt(4), 8)
    [error] = engine.errors()
    assert (error.status, error.code, error.retry_after_seconds) == (503, "queue_full", 1)
    assert "1 sequences may wait" in error.message
    engine.send()
    engine.submit(prompt(4), 8)
    assert len(engine.errors()) == 2  # two run, one waits
    engine.run()
    assert engine.core.scheduler.num_waiting == 0
    engine.submit(prompt(4), 8, n=3)
    engine.submit(prompt(4), 8, n=1)
    assert [error.code for error in engine.errors()[2:]] == ["queue_full"]
    engine.run()


def test_nothing_may_wait() -> None:
    engine = Engine(max_num_seqs=2, max_waiting_seqs=0)
    engine.submit(prompt(4), 4, n=2)
    engine.submit(prompt(4), 4)
    assert len(engine.errors()) == 1
    engine.run()


def test_a_prefix_cache_that_is_reset_finds_nothing() -> None:
    """Not even the blocks of a running sequence; its tokens are what they would have been."""
    engine = Engine(64)
    block = engine.core.scheduler.kv.block_size
    engine.submit(prompt(4 * block), 4)
    engine.run()
    engine.submit(prompt(4 * block), 4)
    for _ in range(3):
        engine.send()
        engine.deliver()
    hits = engine.core.stats().prefix_cache_hits
    assert hits >= 3 * block
    assert engine.core.reset_prefix_cache() >= 4
    assert engine.core.reset_prefix_cache() == 0
    engine.check()
    engine.run()
    engine.core.reset_prefix_cache()
    engine.submit(prompt(4 * block), 4)
    engine.run()
    assert engine.core.stats().prefix_cache_hits == hits
    engine.submit(prompt(4 * block), 4)
    engine.run()
    assert engine.core.stats().prefix_cache_hits > hits
