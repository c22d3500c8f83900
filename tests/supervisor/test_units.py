"""How often, and how soon, a unit is restarted."""

from zlm.supervisor.units import DELAYS_SECONDS, WINDOW_SECONDS, Backoff


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer() -> None:
    backoff = Backoff(most=9)
    delays = [backoff.after_failure(float(at)) for at in range(9)]
    assert delays[:7] == list(DELAYS_SECONDS) and delays[7:] == [DELAYS_SECONDS[-1]] * 2
    assert backoff.after_failure(9.0) is None


def test_what_has_worked_is_restarted_at_once() -> None:
    backoff = Backoff(most=3)
    assert [backoff.after_failure(1.0), backoff.after_failure(2.0)] == list(DELAYS_SECONDS[:2])
    backoff.after_success()
    assert backoff.after_failure(3.0) == 0.0
    assert backoff.after_failure(4.0) is None  # but not for ever


def test_old_failures_are_forgotten_once_it_has_worked() -> None:
    backoff = Backoff(most=1)
    assert backoff.after_failure(0.0) == 0.0
    backoff.after_success()
    assert backoff.after_failure(WINDOW_SECONDS + 1.0) == 0.0
    assert backoff.after_failure(WINDOW_SECONDS + 2.0) is None


def test_what_never_comes_up_is_given_up_however_long_it_takes_to_fail() -> None:
    backoff = Backoff(most=2)
    delays = [backoff.after_failure(at * 2 * WINDOW_SECONDS) for at in range(3)]
    assert delays == [*DELAYS_SECONDS[:2], None]


def test_no_restart_at_all() -> None:
    assert Backoff(most=0).after_failure(5.0) is None
