"""``zlm completion``: what the scripts offer, in bash itself; the others by their text."""

import shutil
import subprocess
import sys

import pytest

from zlm.cli import completion
from zlm.cli.accepted import ACCEPTED
from zlm.cli.arguments import ARGUMENTS
from zlm.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def commands() -> completion.Commands:
    return completion.commands()


@pytest.fixture(scope="module")
def script(commands: completion.Commands) -> str:
    return completion.bash(commands)


def offered(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last of *words*, typed after ``zlm``."""
    typed = " ".join(f"'{word}'" for word in ("zlm", *words))
    program = (
        f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}\n_zlm\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash(script: str) -> None:
    assert offered(script, "") == list(COMMANDS)
    assert offered(script, "se") == ["serve"]
    assert offered(script, "serve", "M", "--max-num-s") == ["--max-num-seqs"]
    assert offered(script, "serve", "M", "--dtype", "flo")[0].startswith("float")
    assert offered(script, "serve", "M", "--host", "x") == [], "any word may stand there"
    assert offered(script, "run", "M", "--outp") == ["--output"]
    assert offered(script, "run", "M", "--max-model") == ["--max-model-len"], "serve's flags too"
    assert "--max-model-len" not in offered(script, "doctor", "--")
    assert {"serve", "compare"} <= set(offered(script, "bench", ""))
    assert offered(script, "bench", "profile", "--bat") == ["--batch"]
    assert offered(script, "bench", "serve", "--conc") == ["--concurrency"], "of several spellings"
    assert offered(script, "bench", "serve", "--good") == ["--goodput"], "of several values"
    assert offered(script, "bench", "serve", "--num-prom") == ["--num-prompts"]
    assert offered(script, "completion", "z") == ["zsh"]
    assert offered(script, "serve", "fold") == [], "files are the shell's business"


def test_every_flag_is_there_in_every_shell(commands: completion.Commands) -> None:
    scripts = {shell: getattr(completion, shell)(commands) for shell in ("bash", "zsh", "fish")}
    for row in (*ARGUMENTS, *ACCEPTED):
        for shell, text in scripts.items():
            name = row.flag if shell != "fish" else f"-l {row.flag[2:]}"
            assert name in text, (shell, row.flag)
    assert set(COMMANDS) == {name.split()[0] for name in commands}
    for shell, text in scripts.items():
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_the_command(capsys: pytest.CaptureFixture[str], script: str) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script + "\n"
    assert main(["completion", "tcsh"]) == 2
    assert "give one of bash, zsh, fish" in capsys.readouterr().err
    assert main(["completion", "--help"]) == 0
    assert "usage: zlm completion {bash,zsh,fish}" in capsys.readouterr().out


def test_it_loads_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from zlm.cli.main import main; "
    code += "main(['completion', 'fish'])"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
