"""Mutated bytes against the front end: a short run of ``bench/byte_fuzz.py``, and its judgement.

The long runs are in bench/RESULTS.md.
"""

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import byte_fuzz

STREAMS = 3000


@pytest.mark.parametrize("number", [1, 2])
def test_streams_through_the_protocol_class(number: int) -> None:
    findings = byte_fuzz.run_protocol(STREAMS // 2, number)
    assert findings.faults == []
    assert findings.let_in > STREAMS / 5  # not all is broken
    assert len(findings.statuses) >= 6


def test_a_request_that_h11_does_not_read_is_a_fault() -> None:
    watched = byte_fuzz.Watched()
    hidden = byte_fuzz._post(b"/nowhere", b"GET /version HTTP/1.1\r\nHost: z\r\n\r\n")
    chance, findings = random.Random(1), byte_fuzz.Findings()
    assert watched.run(hidden + byte_fuzz.SEEDS[0], chance, findings) == []
    handle = watched.house.server.handle
    watched.house.server.handle = lambda exchange: (
        watched.let_in.append(("/smuggled", b"")),
        handle(exchange),
    )
    (fault, *_) = watched.run(byte_fuzz.SEEDS[0], random.Random(1), findings)
    assert "/smuggled" in fault
    watched.close()


def test_a_fault_of_ours_is_a_fault() -> None:
    watched = byte_fuzz.Watched()

    def broken(exchange) -> None:
        raise RuntimeError("broken")

    watched.house.server.handle = broken
    faults = watched.run(byte_fuzz.SEEDS[0], random.Random(1), byte_fuzz.Findings())
    assert any("status 500" in fault for fault in faults)
    assert any("logged GET /health failed" in fault for fault in faults)
    watched.close()


def test_h11_reads_requests_one_after_another() -> None:
    data = b"\r\n" + b"".join(byte_fuzz.SEEDS[:2]) + byte_fuzz._chunked(b"/a", b"hello", 2) + b"GE"
    assert byte_fuzz.as_h11_reads(data) == [
        ("/health", b""),
        ("/version?a=b", b""),
        ("/a", b"hello"),
    ]
    assert byte_fuzz.as_h11_reads(b"nonsense\r\n\r\n") == []
