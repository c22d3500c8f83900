"""The commands themselves: help, version, exit status, what is imported, python -m zlm.serve."""

import subprocess
import sys
from pathlib import Path

import pytest

from zlm import __version__
from zlm.cli.accepted import ACCEPTED
from zlm.cli.arguments import ARGUMENTS
from zlm.cli.bench import MEASUREMENTS
from zlm.cli.main import COMMANDS, main

HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "zmq",
    "yaml",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "prometheus_client",
    "triton",
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


HELP = [[], ["--version"], *([name] for name in COMMANDS if name != "bench")]
HELP += [["bench", name] for name in MEASUREMENTS]


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    """What takes 0.1 s and more to import would be felt; how long all takes is bench's business."""
    code = "import sys\nfrom zlm.cli.main import main\n"
    code += "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
    code += "print('imported', *sys.modules)"
    command = [sys.executable, "-c", code, *words, "--help"]
    imported = subprocess.check_output(command, text=True).split("imported ")[-1].split()
    assert "zlm.cli.main" in imported
    assert not HEAVY & set(imported)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zlm {__version__}\n"


def test_overview_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main([]) == 2
    assert "usage: zlm COMMAND" in capsys.readouterr().err
    assert main(["srve"]) == 2
    assert capsys.readouterr().err == "zlm: no command 'srve'; did you mean serve?\n"


def test_help_has_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "1", "--help"]) == 0
    text = capsys.readouterr().out
    for row in (*ARGUMENTS, *ACCEPTED):
        assert row.flag.removeprefix("--") in text
    for default in ("(default: 8000)", "(default: 0.9)", "(default: 32 MiB)", "(default: on)"):
        assert default in text
    assert "None" not in text and max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("words", [["zlm.cli.main", "serve"], ["zlm.serve"]])
def test_wrong_flags_exit_with_2_and_say_which(words: list[str]) -> None:
    done = run(*words, "--model", "M", "--prot", "1")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "zlm serve: unknown flag --prot; did you mean --port?",
        "zlm serve --help lists the flags",
    ]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("complete --url http://h:1 --temprature 0", "--temprature; did you mean --temperature?"),
        ("complete m --temprature=0", "unknown flag --temprature; did you mean --temperature?"),
        ("chat m --max-modellen 5", "unknown flag --max-modellen; did you mean --max-model-len?"),
        ("run m in -o out --concurency 5", "--concurency; did you mean --concurrency?"),
        ("bench serve http://h:1 --frobnicate", "unknown flag --frobnicate"),
        ("bench startup m --frobnicate", "unknown flag --frobnicate"),
        ("bench compare http://h:1 m --input-token 5", "did you mean --input-tokens?"),
        ("complete m --temperature nan", "--temperature: must be a finite number, got 'nan'"),
        ("complete m --temperature 3", "--temperature: must be between 0 and 2, got '3'"),
        ("complete m --max-tokens -1", "--max-tokens: must be at least 1, got '-1'"),
        ("chat m --top-p 2", "--top-p: must be between 0 and 1, got '2'"),
        ("chat m --seed x", "--seed: must be a whole number, got 'x'"),
        ("run m in -o out --max-tokens 0", "--max-tokens: must be at least 1, got '0'"),
    ],
)
def test_wrong_flags_of_clients_are_told_before_anything_is_asked(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert said in capsys.readouterr().err


def test_where_old_guides_start_a_server() -> None:
    """It says the command of today, and does what that does."""
    done = run("zlm.entrypoints.openai.api_server", "--model", "M", "--prot", "1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[:2] == [
        "zlm: the command for this is zlm serve MODEL, with the same flags",
        "zlm serve: unknown flag --prot; did you mean --port?",
    ]


def test_the_package_is_the_command() -> None:
    assert run("zlm", "--version").stdout == f"zlm {__version__}\n"
    assert run("zlm", "srve").returncode == 2


def test_module_serve_is_serve() -> None:
    assert run("zlm.serve", "--help").stdout == run("zlm.cli.main", "serve", "--help").stdout


def test_streams_that_are_closed_lead_nowhere(tmp_path: Path) -> None:
    """Else a socket would be given the number of one, and who prints would print into it."""
    program = (
        "import os, sys\n"
        "from zlm.cli.main import main\n"
        "status = main(['--version'])\n"
        "print('lost', file=sys.stderr)\n"
        "held = [(os.readlink(f'/proc/self/fd/{n}'), os.get_inheritable(n)) for n in range(3)]\n"
        "open(sys.argv[1], 'w').write(f'{status} {held}')\n"
    )
    said = tmp_path / "said"
    command = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", command, sys.executable, program, said], check=True)
    assert said.read_text() == f"0 {[('/dev/null', True)] * 3}"
