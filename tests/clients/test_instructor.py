"""instructor in the two ways that people use with such servers: JSON schema, and tools.

It runs as a program by an interpreter that has it: this one, or that of the environment which
bin/zlm-test makes on top of this one, because instructor takes openai-python back to an older one.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import instructor_program
import pytest
from instructor_program import MODES, Person


@pytest.fixture(scope="module")
def interpreter() -> str:
    beside = Path(sys.prefix) / "instructor" / "bin" / "python"
    if beside.exists():
        return str(beside)
    if importlib.util.find_spec("instructor") is None:
        pytest.skip("needs instructor")
    return sys.executable


@pytest.fixture(scope="module")
def answers(interpreter: str, base_url: str) -> Any:
    """What the program printed: its answers by mode."""
    program = str(instructor_program.__file__)
    done = subprocess.run(
        [interpreter, program, base_url], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["whole", "asynchronous"])
def test_an_object(way: str, mode: str, answers: Any) -> None:
    person = Person(**answers[mode][way])
    assert person == Person(**answers[mode]["whole"])


@pytest.mark.parametrize("mode", MODES)
def test_an_object_that_grows(mode: str, answers: Any) -> None:
    """Streamed: every partial object is a prefix of the last, which is whole."""
    partials = answers[mode]["partials"]
    assert len(partials) > 2
    assert Person(**partials[-1]) == Person(**answers[mode]["whole"])
    names = [each["name"] for each in partials if each["name"] is not None]
    assert all(names[-1].startswith(name) for name in names)
