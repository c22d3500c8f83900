"""A machine with a systemd of its own, zlm's files in it, to see the units at work.

What boots is this machine's systemd in namespaces (``systemd_machine.sh`` says how), so it needs
root and a file system that an overlay can be laid over. The virtual environment at /opt/zlm/venv is
this interpreter's; zlm is a copy of the source tree. What is not a copy lies under /srv, read-only,
where nothing in the machine would remove it.
"""

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = Path(__file__).with_suffix(".sh")
VENV = Path("opt/zlm/venv")
SOURCE = Path("srv/zlm")
BASE = "/srv/python"
PACKAGES = "/srv/site-packages"


def why_not() -> str | None:
    """Return why no machine can be booted here; None if one can."""
    if os.geteuid() != 0:
        return "a systemd of our own needs root"
    if not Path("/lib/systemd/systemd").exists() or shutil.which("systemctl") is None:
        return "systemd is not installed"
    with tempfile.TemporaryDirectory() as empty:
        tried = boot(Path(empty), "true", seconds=20.0)
    return None if tried.returncode == 0 else f"systemd does not boot here: {tried.stdout[-300:]}"


def boot(folder: Path, *program: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Boot with *folder*'s files, run *program* as root, return its output and exit status."""
    binds = {
        sys.base_prefix: BASE,
        sysconfig.get_path("purelib"): PACKAGES,
    }
    environment = {
        **os.environ,
        "MACHINE_BINDS": " ".join(f"{source}:{target}" for source, target in binds.items()),
        "MACHINE_SECONDS": str(seconds),
    }
    return subprocess.run(
        [str(SCRIPT), str(folder), *program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def in_machine(path: Path) -> str:
    """Return where *path*, which lies in an installed package, is found in the machine."""
    return f"{PACKAGES}/{path.relative_to(sysconfig.get_path('purelib'))}"


def furnish(folder: Path) -> None:
    """Put zlm's source tree and a virtual environment that runs it into *folder*."""
    source, binaries = folder / SOURCE, folder / VENV / "bin"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "zlm", source / "zlm", ignore=ignore)
    shutil.copytree(ROOT / "kernels", source / "zlm" / "kernels", ignore=ignore)
    for name in ("bin", "systemd"):
        shutil.copytree(ROOT / name, source / name)
    shutil.copy(ROOT / "README.md", source)
    binaries.mkdir(parents=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (binaries / "python").symlink_to(f"{BASE}/bin/{version}")
    library = folder / VENV / "lib" / version
    library.mkdir(parents=True)
    (library / "site-packages").symlink_to(PACKAGES)
    (folder / VENV / "pyvenv.cfg").write_text(f"home = {BASE}/bin\n")
    command = binaries / "zlm"
    paths = f"LD_LIBRARY_PATH={BASE}/lib PYTHONPATH=/{SOURCE}"  # libpython may lie in a home
    run = f"{paths} exec /{VENV}/bin/python -m zlm.cli.main"
    command.write_text(f'#!/bin/sh\n{run} "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
