"""An idle tree watched until it is quiet, by a clock and CPU times that the test makes up."""

import time
from collections.abc import Callable

import pytest

from zlm.loadtest import startup
from zlm.loadtest.startup import watch_idle

Watch = Callable[..., dict[str, float | None]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch, in windows of 5 s, a tree that uses *cores* for *busy_seconds* and 0.2 % after."""
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def run(
        busy_seconds: float, *, settle: float = 0.0, cores: float = 0.4
    ) -> dict[str, float | None]:
        nonlocal now
        now = 100.0

        def used(_: list[int]) -> float:
            seconds = now - 100.0
            return cores * min(seconds, busy_seconds) + 0.002 * max(0.0, seconds - busy_seconds)

        monkeypatch.setattr(startup, "cpu_seconds", used)
        return watch_idle(1, 5.0, settle)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(startup, "tree", lambda root: [root])
    return run


def figures(idle: float, quiet: float, after: float | None) -> dict[str, float | None]:
    return {"idle_cpu_percent": idle, "quiet_cpu_percent": quiet, "quiet_after_s": after}


def test_a_quiet_tree_is_watched_once(watch: Watch) -> None:
    assert watch(0.0) == figures(0.2, 0.2, 0.0)


def test_idle_time_that_is_used_first(watch: Watch) -> None:
    assert watch(12.0, settle=2.0) == figures(40.0, 0.2, 12.0)
    assert watch(55.0) == figures(40.0, 0.2, 55.0)


def test_a_tree_that_is_not_quiet_in_time(watch: Watch) -> None:
    assert watch(57.0) == figures(40.0, 16.12, None)
    assert watch(1e9, cores=0.011) == figures(1.1, 1.1, None)


def test_time_that_goes_with_a_process_is_not_quiet(watch: Watch) -> None:
    assert watch(5.0, cores=-0.1) == figures(-10.0, 0.2, 5.0)
