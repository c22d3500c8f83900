"""What keys may use: counted by the second, over several front ends, whoever dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from zlm.api_keys import ApiKey, api_key
from zlm.errors import QuotaExceeded
from zlm.frontend.quotas import OPEN, QuotaPage, Quotas

DIGEST = api_key("k").sha256


def key(**limits: int) -> ApiKey:
    return ApiKey(sha256=DIGEST, **limits)


def quotas(limited: ApiKey, index: int = 0, runtime: Path | None = None) -> Quotas:
    made = Quotas(index, runtime)
    made.configure([limited])
    return made


def admitted(quota: Quotas, limited: ApiKey, now: float) -> bool:
    """Begin and end a request that uses nothing."""
    try:
        quota.begin(limited, now)
    except QuotaExceeded:
        return False
    quota.end(limited, 0, now)
    return True


def test_requests_of_a_minute() -> None:
    limited = key(requests_per_minute=3)
    quota = quotas(limited)
    assert [quota.begin(limited, 100.0 + i).requests for i in range(3)] == [2, 1, 0]
    with pytest.raises(QuotaExceeded) as refused:
        quota.begin(limited, 103.9)
    assert refused.value.status == 429 and refused.value.retry_after_seconds == 58
    assert "3 requests a minute" in refused.value.message
    assert quota.check(limited, 160.9) is not None  # 100 is within the last 60 seconds
    assert quota.check(limited, 161.0) is None
    assert admitted(quota, limited, 161.0) and not admitted(quota, limited, 161.5)


@settings(max_examples=100, deadline=None)
@given(gaps=st.lists(st.floats(0, 100, allow_nan=False), max_size=80), limit=st.integers(1, 5))
def test_never_more_than_the_limit_in_any_minute(gaps: list[float], limit: int) -> None:
    """And who is refused is let in when Retry-After says, or a second later if that is 60."""
    limited = key(requests_per_minute=limit)
    quota = quotas(limited)
    now, let_in = 1000.0, []
    for gap in gaps:
        now += gap
        refusal = quota.check(limited, now)
        assert (refusal is None) == admitted(quota, limited, now)
        if refusal is None:
            let_in.append(now)
        else:
            assert refusal.retry_after_seconds is not None
            now += refusal.retry_after_seconds
            assert refusal.retry_after_seconds <= 60
            again = quota.check(limited, now)
            if again is not None:
                assert (refusal.retry_after_seconds, again.retry_after_seconds) == (60, 1)
                now += 1
            assert admitted(quota, limited, now)
            let_in.append(now)
    for first, last in zip(let_in, let_in[limit:], strict=False):
        assert last - first > 60


def test_tokens_of_a_minute_count_when_a_request_is_over() -> None:
    limited = key(tokens_per_minute=100)
    quota = quotas(limited)
    assert quota.begin(limited, 10.0).tokens == 100
    quota.begin(limited, 10.0)
    quota.end(limited, 70, 11.0)
    assert quota.begin(limited, 12.0).tokens == 30
    quota.end(limited, 90, 12.0)  # over the limit, as nobody could know
    refusal = quota.check(limited, 13.0)
    assert refusal is not None and "100 tokens a minute" in refusal.message
    assert refusal.retry_after_seconds == 11 + 61 - 13
    assert quota.check(limited, 11 + 61) is None


def test_concurrency() -> None:
    limited = key(concurrency=2)
    quota = quotas(limited)
    quota.begin(limited, 1.0)
    quota.begin(limited, 1.0)
    with pytest.raises(QuotaExceeded, match="2 requests at once"):
        quota.begin(limited, 500.0)
    quota.end(limited, 0, 501.0)
    quota.begin(limited, 501.0)


def test_front_ends_share_what_is_used(tmp_path: Path) -> None:
    limited = key(requests_per_minute=3, tokens_per_minute=50, concurrency=2)
    first, second = (quotas(limited, index, tmp_path) for index in range(2))
    first.begin(limited, 1.0)
    assert second.begin(limited, 1.0).requests == 1
    assert "at once" in str(first.check(limited, 1.0))
    second.end(limited, 50, 2.0)
    assert "50 tokens" in str(first.check(limited, 2.0))
    assert (tmp_path / "quotas").stat().st_mode & 0o777 == 0o600


def test_what_a_killed_front_end_held_is_free_again(tmp_path: Path) -> None:
    limited = key(concurrency=2, requests_per_minute=3)
    first, second = (quotas(limited, index, tmp_path) for index in range(2))
    first.begin(limited, 1.0)
    second.begin(limited, 1.0)
    assert first.check(limited, 1.0) is not None
    successor = quotas(limited, 1, tmp_path)
    assert successor.begin(limited, 1.0).requests == 0  # what was used stays used
    with pytest.raises(QuotaExceeded, match="3 requests a minute"):
        successor.begin(limited, 1.0)


def test_keys_without_limits_cost_nothing(tmp_path: Path) -> None:
    free = api_key("k")
    quota = quotas(free, 0, tmp_path)
    assert quota.begin(free, 1.0).requests is None
    quota.end(free, 10, 1.0)
    assert not (tmp_path / "quotas").exists()


def test_a_new_key_finds_its_place_and_an_old_one_keeps_its_counts(tmp_path: Path) -> None:
    old = key(requests_per_minute=1)
    quota = quotas(old, 0, tmp_path)
    quota.begin(old, 1.0)
    new = ApiKey(sha256=api_key("new").sha256, requests_per_minute=1)
    quota.configure([new, old])
    assert quota.begin(new, 1.0).requests == 0
    assert quota.check(old, 1.0) is not None


RACER = """
import sys
from pathlib import Path
from zlm.api_keys import ApiKey
from zlm.errors import QuotaExceeded
from zlm.frontend.quotas import Quotas
limited = ApiKey(sha256=sys.argv[3], requests_per_minute=1000)
quota = Quotas(int(sys.argv[2]), Path(sys.argv[1]))
quota.configure([limited])
print("up", flush=True)
sys.stdin.readline()
count = 0
for _ in range(900):
    try:
        quota.begin(limited, 50.0)
        count += 1
    except QuotaExceeded:
        pass
print(count)
"""


def test_the_count_is_exact_when_processes_race(tmp_path: Path) -> None:
    """Four processes ask 3,600 times for 1,000 requests; one is killed on the way."""
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [
        subprocess.Popen(
            [*command, str(index), DIGEST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for index in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "up\n"
    held = QuotaPage(tmp_path)
    with held.locked():  # all wait for the lock, and the one that dies cannot hold it for ever
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        racers[0].send_signal(signal.SIGKILL)
        racers[0].wait()
    counts = [int(racer.communicate(timeout=30)[0]) for racer in racers[1:]]
    assert sum(counts) == 1000
    with held.locked():
        assert sum(held.record(key())[OPEN : OPEN + 64]) == 1000
    os.close(held._fd)
