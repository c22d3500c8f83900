"""Random lives of an engine: whatever happens, every sequence is what it is alone.

Each example is an engine of random shape (tiny pools, windows, budgets, run-ahead, caching) and a
random list of actions. The fake worker checks every step, ``Engine.check`` the books after
every action, and ``Engine.judge`` in the end that each sequence got its one terminal, exactly the
tokens it gets when generated alone, and gave back its blocks.
"""

from driver import EOS, VOCAB, Engine
from hypothesis import HealthCheck, given, note, settings, strategies as st

from zlm.messages import ROW_ALL_MASKED, ROW_NAN

WINDOWS = st.sampled_from([(0,), (0, 5), (3,), (0, 1), (0, 4, 9), (2, 8), (0, -6), (-4,)])

# Prompts are made of few pieces, so that prefixes meet each other in the cache.
PIECES = [[1, 2, 4, 5], [6, 7, 8, 9], [1, 2, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13], [EOS, 1]]
PROMPTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(
    lambda pieces: [token for piece in pieces for token in piece]
)

SUBMITS = st.tuples(
    st.just("submit"),
    st.fixed_dictionaries(
        {"prompt": PROMPTS, "max_tokens": st.integers(1, 24)},
        optional={
            "n": st.integers(1, 4),
            "owner": st.integers(0, 2),
            "priority": st.integers(-1, 1),
            "salt": st.sampled_from([b"", b"x"]),
            "logprobs": st.integers(0, 2),
            "prompt_logprobs": st.integers(0, 2),
            "min_tokens": st.integers(0, 5),
            "stop_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
            "ignore_eos": st.booleans(),
            "mask": st.booleans(),
        },
    ),
)
ACTIONS = st.one_of(
    SUBMITS,
    SUBMITS,
    SUBMITS,
    st.tuples(st.just("send"), st.none()),
    st.tuples(st.just("deliver"), st.none()),
    st.tuples(st.just("work"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.lists(st.integers(0, 30), min_size=1, max_size=3)),
    st.tuples(st.just("fail"), st.integers(0, 30)),
)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    windows = draw(WINDOWS)
    num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.integers(0, 3)) > 0
    budget = draw(st.integers(num_seqs, 20)) if chunked else 64
    options = {
        "windows": windows,
        "num_blocks": tuple(draw(st.integers(6, 24)) for _ in windows),
        "block_size": draw(st.sampled_from([2, 4])),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": budget,
        "run_ahead": draw(st.integers(1, 3)),
        "prefix_caching": draw(st.booleans()),
        "chunked": chunked,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
    }
    note(repr(options))
    return Engine(**options)


def act(engine: Engine, action: str, argument: object) -> None:
    """Do one action; numbers pick one of the sequences submitted so far."""
    ids = list(engine.told)
    if action == "submit":
        engine.submit(**argument)
    elif action == "send":
        engine.send()
    elif action == "deliver":
        engine.deliver()
    elif action == "work":
        for _ in range(argument):
            engine.send()
            engine.deliver()
    elif action == "abort" and ids:
        engine.abort(*dict.fromkeys(ids[number % len(ids)] for number in argument))
    elif action == "fail" and ids:
        told = engine.told[ids[argument % len(ids)]]
        status = ROW_NAN if argument % 2 else ROW_ALL_MASKED
        engine.worker.failing[told.submit.sampling.seed + told.sample] = status


@settings(
    max_examples=600,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(engines(), st.lists(ACTIONS, min_size=12, max_size=40))
def test_every_sequence_is_what_it_is_alone(engine: Engine, actions: list) -> None:
    for action, argument in actions:
        act(engine, action, argument)
        engine.check()
    engine.run()
    for error in engine.errors():
        assert error.status in (400, 500)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=8),
    block_size=st.sampled_from([2, 4]),
    budget=st.sampled_from([4, 7, 64]),
    run_ahead=st.integers(1, 3),
    windows=WINDOWS,
)
def test_pressure_never_changes_an_output(
    prompts: list[list[int]], block_size: int, budget: int, run_ahead: int, windows: tuple
) -> None:
    """As many blocks as the longest sequence needs alone, all at once (CASES 48)."""
    longest = max(len(prompt) for prompt in prompts) + 12
    engine = Engine(
        num_blocks=-(-longest // block_size) + 1,
        windows=windows,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        run_ahead=run_ahead,
    )
    for prompt in prompts:
        engine.submit(prompt, 12, ignore_eos=True, logprobs=1)
    engine.run()
    assert not engine.errors()
