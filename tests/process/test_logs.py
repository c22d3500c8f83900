"""Log lines: their form, their level, and that data cannot break or forge one."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zlm.process.logs import FORMAT, JsonFormatter, LineFormatter, escape

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


def test_a_line_that_a_full_disk_cut_does_not_run_into_the_next(tmp_path: Path) -> None:
    code = (
        "import logging, resource\n"
        "from zlm.process.logs import start_logging\n"
        "start_logging('engine')\n"
        "limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))\n"
        "limit(100)\n"
        "for word in 'first', 'second' * 9, 'third':\n"
        "    logging.error(word)\n"
        "limit(1000)\n"
        "logging.error('fourth'); logging.error('fifth')"
    )
    with (tmp_path / "log").open("a+") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, check=True)
        log.seek(0)
        first, cut, *after = log.read().splitlines()
    assert first.endswith("first") and "second" in cut and len(f"{first}\n{cut}") == 100
    told = "lines of this log that were lost before: 2 (File too large)"
    assert [line.split(" engine ", 1)[1] for line in after] == ["fourth", told, "fifth"]


def test_a_record_as_json_is_one_line_with_its_fields() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        facts = (type(error), error, error.__traceback__)
    record = logging.makeLogRecord(
        {
            "msg": "got %s",
            "args": ("x\r\n\u2028 \ud83d caf\xe9",),
            "name": "zlm.x",
            "levelname": "ERROR",
            "created": 1_796_000_000.5,
            "msecs": 500.0,
            "exc_info": facts,
            "fields": {"status": 200, "message": "forged", "path": Path("/x")},
        }
    )
    line = JsonFormatter("engine").format(record)
    assert len(line.splitlines()) == 1 and line.isascii()
    told = json.loads(line)
    assert told.pop("traceback").endswith("ValueError: a\nb")
    assert told == {
        "time": "2026-11-30T00:53:20.500Z",
        "level": "error",
        "process": "engine",
        "logger": "zlm.x",
        "message": "got x\r\n\u2028 \ud83d caf\xe9",
        "status": 200,
        "path": "/x",
    }


def test_children_log_in_the_form_of_their_parent() -> None:
    child = "from zlm.process.logs import start_logging as s; import logging; s('child'); "
    child += "logging.getLogger('zlm').info('one')"
    parent = (
        "import logging, subprocess, sys\n"
        "from zlm.process.logs import start_logging\n"
        "start_logging('supervisor', sys.argv[1])\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
        "logging.getLogger('zlm').info('two')"
    )
    for form in ("json", "text"):
        done = subprocess.run(
            [sys.executable, "-c", parent, form],
            capture_output=True,
            text=True,
            check=True,
            env={FORMAT: "json"},  # what the flag says is what counts
        )
        lines = done.stderr.splitlines()
        assert len(lines) == 2 and all(line.startswith("{") == (form == "json") for line in lines)
