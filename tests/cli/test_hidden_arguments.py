"""Keys on the command line are gone from ps as soon as the program runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from zlm.cli.hidden_arguments import secret_spans

SHOW = """
import sys
from pathlib import Path
from zlm.cli.hidden_arguments import hide_keys
print(hide_keys())
print(Path("/proc/self/cmdline").read_bytes().replace(b"\\0", b" ").decode())
print(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("M --api-key abc --port 1", "M --api-key *** --port 1"),
        ("M --api-key=abc --port 1", "M --api-key=*** --port 1"),
        ("M --api_key abc", "M --api_key ***"),
        ("M --admin-api-key abc --api-key de", "M --admin-api-key *** --api-key **"),
        ("M --api-key --api-key", "M --api-key *********"),
        ("M --api-key-file abc", "M --api-key-file abc"),
        ("M --api-key", "M --api-key"),
        ("M --api-key=", "M --api-key="),
    ],
)
def test_what_is_a_key(words: str, shown: str) -> None:
    memory = bytearray(b"\0".join(words.encode().split()) + b"\0")
    for at, length in secret_spans(bytes(memory)):
        memory[at : at + length] = b"*" * length
    assert b" ".join(memory.split(b"\0")).strip() == shown.encode()


def test_a_process_hides_its_own() -> None:
    words = ["M", "--api-key", "key-1", "--admin_api_key=key-22", "--port", "8000"]
    result = subprocess.run(
        [sys.executable, "-c", SHOW, *words], capture_output=True, text=True, check=True
    )
    shown, _, argv = result.stdout.rstrip().rpartition("\n")
    assert shown.startswith("2\n")
    assert shown.endswith("M --api-key ***** --admin_api_key=****** --port 8000 ")
    assert "key-1" not in shown and "key-22" not in shown
    assert argv == str(words)  # the program itself still knows them


def test_serve_hides_keys_before_it_does_anything(tmp_path: Path) -> None:
    """And says nothing of them when a flag is wrong."""
    command = [sys.executable, "-m", "zlm.cli.main", "serve", "M", "--api-key", "secret-1"]
    result = subprocess.run([*command, "--prt", "1"], capture_output=True, text=True)
    assert result.returncode == 2 and "did you mean --port" in result.stderr
    assert "secret" not in result.stderr + result.stdout
