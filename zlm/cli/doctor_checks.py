"""What ``zlm doctor`` looks at: each check is a function that returns findings.

The machine is left as it is (a file is tried in two folders, and gone at once), and nothing is
imported that could take this process down: torch is asked in one of its own, since a broken driver
can hang whoever starts it. No check raises.
"""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zlm import __version__
from zlm.supervisor.device import missing_gpu, missing_package
from zlm.worker import native_build

PACKAGES = ("torch", "triton", "tokenizers", "safetensors", "pyzmq", "msgspec")
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
TORCH_SECONDS = 120.0  # a first import from a cold disk takes long
HUB_SECONDS = 5.0
FEW_FILES = 4096  # each client is a descriptor, and so is each process's socket
LITTLE_DISK = 20 * 2**30
LITTLE_MEMORY = 4 * 2**30
HUB = "https://huggingface.co"
TORCH_PROGRAM = """
import json, torch
facts = {"cuda": torch.version.cuda, "gpus": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{card.major}.{card.minor}"
        facts["gpus"].append([card.name, capability, free, total])
    torch.zeros(8, device="cuda").sum().item()
print(json.dumps(facts))
"""


class State(Enum):
    """How a finding is to be taken."""

    GOOD = "ok"
    NOTE = "note"  # worth knowing; zlm works
    BAD = "bad"  # something that was asked for does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``advice`` says what to do about it."""

    state: State
    what: str
    text: str
    advice: str = ""


def python() -> Iterator[Finding]:
    """The interpreter and zlm itself."""
    version = sys.version_info[:2]
    text = f"zlm {__version__} on Python {platform.python_version()}, {platform.platform()}"
    if version < OLDEST_PYTHON or version > NEWEST_PYTHON:
        advice = "use Python 3.11, 3.12 or 3.13: others are not tested"
        yield Finding(State.NOTE, "python", text, advice)
    else:
        yield Finding(State.GOOD, "python", text)


def packages() -> Iterator[Finding]:
    """The packages that a server needs, with their versions."""
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding(State.GOOD, "packages", ", ".join(found))
    needed = [name for name in missing if name != "triton"]  # which only GPUs need
    if needed:
        yield Finding(State.BAD, "packages", f"missing: {', '.join(needed)}", "install zlm again")


def gpu() -> Iterator[Finding]:
    """The driver, its cards, and whether torch can use them."""
    absent = missing_gpu()
    if absent is not None:
        yield Finding(State.NOTE, "gpu", absent, "zlm serves on the CPU here")
        compiler = native_build.compiler()
        if compiler is not None:
            yield Finding(State.GOOD, "kernels", f"C compiler {compiler} for those of the CPU")
        else:
            advice = "apt install gcc, or the like of your system: decoding is faster with kernels"
            yield Finding(State.NOTE, "kernels", "no C compiler for those of the CPU", advice)
        return
    lacking = missing_package()
    if lacking is not None:
        advice = "install torch's CUDA build: pip install torch"
        yield Finding(State.BAD, "gpu", f"there is a GPU, but {lacking}", advice)
        return
    yield from _cards(ask_torch())
    yield from _compiler()


def ask_torch(seconds: float = TORCH_SECONDS) -> dict[str, object] | str:
    """Return what torch says of the GPUs, or why it says nothing."""
    command = [sys.executable, "-c", TORCH_PROGRAM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"torch did not start CUDA within {seconds:g} s: the driver hangs"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return lines[-1]
    facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _cards(facts: dict[str, object] | str) -> Iterator[Finding]:
    if isinstance(facts, str):
        yield Finding(State.BAD, "gpu", facts, "see nvidia-smi and dmesg; reboot after an update")
        return
    cards = facts["gpus"]
    assert isinstance(cards, list)
    if not cards:
        text = f"torch (built for CUDA {facts['cuda']}) sees no GPU"
        yield Finding(State.BAD, "gpu", text, "the driver may be older than that CUDA: update it")
    for name, capability, free, total in cards:
        text = f"{name}, compute capability {capability}, {free / 2**30:.1f} of "
        text += f"{total / 2**30:.1f} GiB free"
        if free < 0.5 * total:
            yield Finding(State.NOTE, "gpu", text, "nvidia-smi lists who holds the rest")
        elif float(capability) < 8.0:
            advice = "no bfloat16 on such a card: zlm computes in float16"
            yield Finding(State.NOTE, "gpu", text, advice)
        else:
            yield Finding(State.GOOD, "gpu", text)


def _compiler() -> Iterator[Finding]:
    """Triton compiles a small C library at its first start."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = ["a C compiler"] if not compiler else []
    missing += [] if header.is_file() else [f"Python's header {header}"]
    if missing:
        minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
        advice = f"apt install gcc python{minor}-dev, or the like of your system"
        yield Finding(State.BAD, "triton", f"it needs {' and '.join(missing)}", advice)
    else:
        yield Finding(State.GOOD, "triton", f"C compiler {compiler}, {header}")


def machine() -> Iterator[Finding]:
    """Processors, memory and open files."""
    cpus = len(os.sched_getaffinity(0))
    facts = Path("/proc/meminfo").read_text().split()
    available = int(facts[facts.index("MemAvailable:") + 1]) * 1024
    text = f"{cpus} CPUs, {available / 2**30:.1f} GiB of memory available"
    if available < LITTLE_MEMORY:
        yield Finding(State.NOTE, "machine", text, "the smallest models need about 3 GiB")
    else:
        yield Finding(State.GOOD, "machine", text)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        text = f"at most {hard} open files a process: so many clients at once"
        yield Finding(State.NOTE, "machine", text, "raise LimitNOFILE of the unit, or ulimit -n")


def folders(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Where checkpoints and compiled kernels are kept."""
    home = Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    for what, path in (("model cache", home), ("kernel cache", _kernel_folder(environment))):
        existing = next(each for each in (path, *path.parents) if each.exists())
        free = shutil.disk_usage(existing).free
        text = f"{path}, {free / 2**30:.1f} GiB free"
        if not _can_write(existing):
            name = "HF_HOME" if what == "model cache" else "XDG_CACHE_HOME"
            yield Finding(State.BAD, what, f"{path} cannot be written", f"set {name} to another")
        elif what == "model cache" and free < LITTLE_DISK:
            yield Finding(State.NOTE, what, text, "an 8B model takes 16 GB")
        else:
            yield Finding(State.GOOD, what, text)


def _can_write(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _kernel_folder(environment: Mapping[str, str]) -> Path:
    cache = environment.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path("~/.cache").expanduser()) / "zlm"


def port(host: str, number: int) -> Iterator[Finding]:
    """Whether the server can listen where it will."""
    at = f"{host}:{number}"
    try:
        family, *_, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except OSError as error:
        advice = f"ss -ltnp 'sport = :{number}' tells who has it; or give --port"
        yield Finding(State.BAD, "port", f"{at}: {error.strerror or error}", advice)
    else:
        yield Finding(State.GOOD, "port", f"{at} is free")


def hub(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether Hugging Face's hub can be reached, and with which token."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        yield Finding(State.NOTE, "hub", "HF_HUB_OFFLINE is set: only what is cached is served")
        return
    endpoint = environment.get("HF_ENDPOINT", HUB).rstrip("/")
    names = ("HF_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    token = next((environment[name] for name in names if environment.get(name)), "")
    url = f"{endpoint}/api/whoami-v2" if token else f"{endpoint}/api/models?limit=1"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with_token = "with a token" if token else "without a token: gated models cannot be fetched"
    try:
        with urlopen(Request(url, headers=headers), timeout=HUB_SECONDS):
            yield Finding(State.GOOD, "hub", f"{endpoint} answers, {with_token}")
    except HTTPError as error:
        if error.code == 401:
            advice = "make a new one on the hub's settings page"
            yield Finding(State.BAD, "hub", f"{endpoint} refuses the token", advice)
        else:
            yield Finding(State.NOTE, "hub", f"{endpoint} answers with status {error.code}")
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        advice = "local folders and GGUF files can be served; for ids see the proxy and DNS"
        yield Finding(State.NOTE, "hub", f"{endpoint} cannot be reached: {reason}", advice)
