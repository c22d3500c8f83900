"""The periodic line: what it covers, and that it is silent while nothing happens."""

from zlm.engine.activity import SECONDS, Activity
from zlm.metrics import EngineStats


def stats(**counts) -> EngineStats:
    return EngineStats(**counts)


def test_rates_are_those_of_the_time_in_which_there_was_work() -> None:
    activity = Activity(stats(prompt_tokens=100), now=0.0)
    assert activity.wait_seconds(3600.0) is None
    activity.note(3600.0, idle=False)
    assert activity.wait_seconds(3600.0) == SECONDS
    activity.note(3602.0, idle=True)
    activity.note(3604.0, idle=False)
    activity.note(3606.0, idle=True)
    assert activity.wait_seconds(3606.0) == SECONDS - 6.0
    line = activity.line(
        stats(
            prompt_tokens=140, generation_tokens=80, prefix_cache_queries=40, prefix_cache_hits=10,
            kv_usage=0.1234,
        ),
        now=3610.0,
    )  # fmt: skip
    assert line.fields == {
        "running": 0,
        "waiting": 0,
        "kv_usage_percent": 12.3,
        "prefix_hit_percent": 25.0,
        "prompt_tokens_per_s": 10.0,
        "generation_tokens_per_s": 20.0,
        "preemptions": 0,
    }
    assert line.text == (
        "running 0, waiting 0, KV cache 12.3 %, prefix hits 25.0 %, "
        "prompt 10.0 tokens/s, generation 20.0 tokens/s"
    )
    assert activity.wait_seconds(3700.0) is None


def test_lines_of_a_long_load_come_at_intervals() -> None:
    activity = Activity(stats(), now=0.0)
    activity.note(1.0, idle=False)
    assert activity.wait_seconds(1.0) == SECONDS
    activity.note(11.0, idle=False)
    assert activity.wait_seconds(11.0) == 0.0
    line = activity.line(stats(generation_tokens=1000, preemptions=2), now=11.0)
    assert line.fields["generation_tokens_per_s"] == 100.0
    assert line.text.endswith(", 2 preemptions")
    activity.note(11.5, idle=False)
    assert activity.wait_seconds(11.5) == SECONDS - 0.5
    line = activity.line(stats(generation_tokens=3000, preemptions=2), now=21.0)
    assert line.fields["generation_tokens_per_s"] == 200.0
