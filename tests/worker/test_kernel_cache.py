"""Where compiled kernels are kept; and that a second start finds all that the first compiled."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running_server import eventually_true
from tiny_models import LLAMA

from zlm.config import (
    Config,
    ModelOptions,
    ParallelOptions,
    Resolved,
    SchedulerOptions,
    ServerOptions,
    resolve,
)
from zlm.worker import kernel_cache, kernel_farm
from zlm.worker.kernel_cache import (
    BINARY_ONLY_VARIABLE,
    FOLDER_VARIABLE,
    WarmMark,
    facts_of,
    own_folder,
)
from zlm.worker.kernel_variants import Variant


def prepared(**environment: str) -> tuple[Path, dict[str, str]]:
    return kernel_cache.prepare(environment), environment


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_users_own_folder_is_honoured(tmp_path: Path) -> None:
    given = {FOLDER_VARIABLE: "/elsewhere", BINARY_ONLY_VARIABLE: "0", "HOME": str(tmp_path)}
    folder, environment = prepared(**given)
    assert folder == Path("/elsewhere") and environment == given
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("CACHE_DIRECTORY", "XDG_CACHE_HOME", "HOME"), "CACHE_DIRECTORY/kernels"),
        (("XDG_CACHE_HOME", "HOME"), "XDG_CACHE_HOME/zlm/kernels"),
        (("HOME",), "HOME/.cache/zlm/kernels"),
    ],
)
def test_the_best_folder_is_made_and_private(
    tmp_path: Path, names: tuple[str, ...], expected: str
) -> None:
    folder, environment = prepared(**{name: str(tmp_path / name) for name in names})
    assert folder == tmp_path / expected and mode(folder) == 0o700
    assert environment[FOLDER_VARIABLE] == str(folder)
    assert environment[BINARY_ONLY_VARIABLE] == "1"


def test_systemd_may_give_several(tmp_path: Path) -> None:
    folder, _ = prepared(CACHE_DIRECTORY=f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert folder == tmp_path / "a" / "kernels"


def test_a_relative_xdg_folder_is_ignored(tmp_path: Path) -> None:
    folder, _ = prepared(XDG_CACHE_HOME="cache", HOME=str(tmp_path))
    assert folder == tmp_path / ".cache" / "zlm" / "kernels"


def test_without_any_folder_one_is_made_for_this_start(caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = prepared(HOME="/proc/nowhere")
    assert folder.is_dir() and mode(folder) == 0o700
    assert "compiled kernels cannot be kept (/proc/nowhere/.cache/zlm: " in caplog.text
    folder.rmdir()


def test_a_folder_that_others_may_write_is_closed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    assert mode(own_folder(tmp_path / "open")) == 0o700


def test_a_folder_of_another_user_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        own_folder(tmp_path)


START = """
import sys

import torch

from zlm.kernels import rms_norm, step_state
from zlm.worker import kernel_farm
from zlm.worker.kernel_farm import Farm
from zlm.worker.kernel_variants import Recorder, current_target, use_target

use_target(("cuda", 90, 32))


def step():
    x = torch.ones(4, 256, dtype=torch.bfloat16)
    weight, out = torch.ones(256), torch.empty(4, 256, dtype=torch.bfloat16)
    for _ in range(3):
        rms_norm.rms_norm(x, weight, 1e-5, out=out)
        rms_norm.rms_norm(x, weight, 1e-5, out=out, residual=x, residual_out=x)
    entries, blocks = torch.zeros(2, 2).int(), torch.zeros(1, 2, 4).int()
    step_state.write_blocks(entries, blocks)
    return out


noted = []
with Recorder(noted.append) as recorder:
    assert not step().any()  # what no kernel has written is zeros
assert noted == recorder.variants
print(len(recorder.variants), recorder.num_cached)
if recorder.variants:
    with Farm(2) as farm:
        kernel_farm.REPORT_SECONDS, told = 0.01, []
        failures = farm.compile(recorder.variants, current_target(), told.append)
    assert told[-1] == f"compiling kernels: 0 of {len(recorder.variants)} left"
    # Without a driver there is no library to link the launchers with; kernels are compiled first.
    assert all("libcuda" in error for error in failures.values()), failures
try:
    step()
except AttributeError:  # not recording, kernels are launched: here is no driver to do it
    print("launched")
"""


def test_a_second_start_finds_all_that_the_first_compiled(tmp_path: Path) -> None:
    """Kernels of a step are noted once each, compiled by processes, and found by the next start."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", FOLDER_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", START]
    outputs = [
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert outputs == ["3 0\nlaunched\n", "0 3\nlaunched\n"]
    assert len(list(tmp_path.glob("*/*.cubin"))) == 3


ORPHANS = """
import os

from zlm.worker.kernel_farm import Farm

print(Farm(2)._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_compiling_processes_end_with_the_worker(tmp_path: Path) -> None:
    """Whatever ends it: they read its end of their sockets."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", FOLDER_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", ORPHANS]
    worker = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    assert worker.returncode == -signal.SIGKILL

    group = int(worker.stdout)

    def gone() -> bool:  # but for those whose end nobody has asked about
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, itself = stat.read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):  # it ended meanwhile
                continue
            if int(itself) == group and state != "Z":
                return False
        return True

    assert eventually_true(gone, 60)


def test_a_start_like_one_before_is_marked(tmp_path: Path) -> None:
    mark = WarmMark(tmp_path, b"llama, H200")
    assert not mark.is_set()
    mark.set()
    assert WarmMark(tmp_path, b"llama, H200").is_set()
    assert not WarmMark(tmp_path, b"llama, H100").is_set()
    WarmMark(tmp_path / "gone", b"").set()  # tells, and goes on


def test_compiling_processes_start_early_unless_a_start_like_this_found_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another port or place of the model is no difference, another limit is; a second worker of a
    machine never starts any."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    started = []
    monkeypatch.setattr(kernel_farm, "Farm", lambda: started.append(1) or "farm")

    def resolved(device: str = "cuda", ranks: int = 1, **parts: Any) -> Resolved:
        parallel = ParallelOptions(tensor_parallel_size=ranks)
        config = Config(model=ModelOptions(model="m"), parallel=parallel, **parts)
        return resolve(config, LLAMA, model_path="m", tokenizer_path="m", device=device)

    def starts(each: Resolved, rank: int = 0) -> bool:
        return kernel_farm.start_early(each, rank) is not None

    assert starts(resolved()) and not starts(resolved(device="cpu"))
    assert starts(resolved(ranks=2)) and not starts(resolved(ranks=2), 1)
    WarmMark(tmp_path, facts_of(resolved(), 0)).set()
    assert not starts(resolved())
    moved = msgspec.structs.replace(resolved(server=ServerOptions(port=9)), model_path="elsewhere")
    assert not starts(moved)
    assert starts(resolved(scheduler=SchedulerOptions(max_num_seqs=3)))
    assert starts(resolved(ranks=2))
    assert len(started) == 4


def test_compiling_processes_that_nothing_was_asked_of_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_farm, "CLOSE_SECONDS", 1e6)
    farm = kernel_farm.Farm(1)
    os.kill(farm._process.pid, signal.SIGSTOP)  # it would not end by itself
    farm.close()
    assert farm._process.returncode == -signal.SIGKILL


def test_what_launches_kernels_alike_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is C, from the arguments' types, whatever they are called and the constants are."""
    asked = []

    def ask(_: object, variant: Variant, target: object, launches: bool) -> str:
        asked.append((variant.name, launches))
        return ""

    monkeypatch.setattr(kernel_farm, "_ask", ask)
    kinds = {
        "add": {"p_x": "*bf16", "n": "i32", "BLOCK": "constexpr"},
        "copy": {"p_out": "*bf16", "rows": "i32", "PDL": "constexpr"},
        "wide": {"p_x": "*fp32", "n": "i32", "BLOCK": "constexpr"},
    }
    variants = [
        Variant("m", name, json.dumps({"signature": signature, "constant_vals": [n]}))
        for n in (1, 2)
        for name, signature in kinds.items()
    ]
    with kernel_farm.Farm(1) as farm:
        farm.compile(variants, ("cuda", 90, 32))
    names = [*kinds, *kinds]
    assert asked == list(zip(names, [True, False, True, False, False, False], strict=True))
