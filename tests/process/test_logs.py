"""Log lines: their form, their level, and that data cannot break or forge one."""

import logging
import re
import subprocess
import sys

import pytest

from zlm.process.logs import LineFormatter, escape

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (INFO|WARNING|ERROR) +engine ")


def test_a_message_is_one_line_whatever_is_in_it() -> None:
    message = "bad\r\n2026-01-01 00:00:00.000 INFO engine forged\x1b[31m \u2028 caf\xe9 \ud83d"
    record = logging.makeLogRecord({"msg": "got %s", "args": (message,), "levelname": "INFO"})
    line = LineFormatter("engine").format(record)
    assert len(line.splitlines()) == 1 and LINE.match(line)
    assert line.endswith(r"got bad\r\n2026-01-01 00:00:00.000 INFO engine forged\x1b[31m \u2028 "
                         "caf\xe9 " r"\ud83d")  # fmt: skip


def test_every_line_of_a_traceback_has_the_prefix() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        facts = (type(error), error, error.__traceback__)
    record = logging.makeLogRecord({"msg": "failed", "levelname": "ERROR", "exc_info": facts})
    lines = LineFormatter("engine").format(record).splitlines()
    assert len(lines) >= 5 and all(LINE.match(line) for line in lines)
    assert lines[0].endswith("engine failed") and lines[-2].endswith("ValueError: a")


def test_plain_text_is_left_as_it_is() -> None:
    assert escape("Grüße, 世界 🙂 \\n") == "Grüße, 世界 🙂 \\n"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["low", "middle", "high"]),
        ("INFO", ["middle", "high"]),
        ("error", ["high"]),
        ("loud", ["ZLM_LOG=loud is none of debug, info, warning, error", "middle", "high"]),
    ],
)
def test_level_comes_from_the_environment(level: str, expected: list[str]) -> None:
    code = (
        "import logging\n"
        "from zlm.process.logs import start_logging\n"
        "start_logging('engine')\n"
        "log = logging.getLogger('zlm.x')\n"
        "log.debug('low'); log.info('middle'); log.error('high')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={"ZLM_LOG": level}, capture_output=True, text=True, check=True
    )
    assert [line.split(" engine ", 1)[1] for line in done.stderr.splitlines()] == expected
