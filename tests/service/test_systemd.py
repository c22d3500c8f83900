"""The units under a real systemd, booted in namespaces: what ``scenario.py`` sees there.

All checks, also those that take long, with their times: ``python bench/service.py``.
"""

import shutil
from pathlib import Path

import pytest
import systemd_machine
import tiny

CHECKS = [
    "install",
    "install_again",
    "settings",
    "sandbox",
    "stop",
    "restart",
    "kill",
    "uninstall",
]


@pytest.fixture(scope="module")
def said(minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines that the scenario printed, to its end or to the first check that failed."""
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("machine")
    systemd_machine.furnish(folder)
    shutil.copy(Path(__file__).with_name("scenario.py"), folder / "srv")
    model = tiny.tiny_checkpoint(folder / "srv" / "tiny", "llama", max_position_embeddings=512)
    for path in model.iterdir():
        path.chmod(0o644)
    models = ["/srv/tiny", systemd_machine.in_machine(minilm_path)]
    program = ["/opt/zlm/venv/bin/python", "/srv/scenario.py", *models, *CHECKS]
    return systemd_machine.boot(folder, *program, seconds=400.0).stdout.splitlines()


@pytest.mark.timeout(450)
@pytest.mark.parametrize("check", CHECKS)
def test_holds(said: list[str], check: str) -> None:
    ended = [line.split()[1] for line in said if line.startswith("ok ")]
    assert check in ended, "\n".join(said[-80:])
