"""Which device is found, on machines of every kind: folders and environments stand for them."""

from pathlib import Path

import pytest
from specs import small_spec

from zlm.config import CacheOptions, ComputeOptions, Config, ModelOptions, ParallelOptions
from zlm.errors import ConfigError
from zlm.supervisor import device as device_module, resolve as resolve_module
from zlm.supervisor.device import check_number, choose, find_device, missing_gpu, num_gpus
from zlm.supervisor.resolve import idle_flags, resolve_config

PRESENT = "libc.so.6"  # stands for a driver library that is there


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A /dev with two GPUs."""
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "is_seen"),
    [
        (None, True),
        ("0", True),
        ("1,0", True),
        (" 1", True),
        ("GPU-8932f937", True),
        ("MIG-1", True),
        ("", False),
        ("-1", False),
        ("-1,0", False),
        ("2", False),
        ("NoDevFiles", False),
    ],
)
def test_cuda_visible_devices_is_honoured(dev: Path, visible: str | None, is_seen: bool) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    reason = missing_gpu(environment, dev, PRESENT)
    assert reason == (None if is_seen else f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")


def test_a_machine_without_gpu(tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    assert "there is no NVIDIA GPU here" in (missing_gpu({}, tmp_path, PRESENT) or "")


def test_a_driver_that_has_nodes_for_control_alone(dev: Path) -> None:
    (dev / "nvidia0").unlink()
    (dev / "nvidia1").unlink()
    assert "there is no NVIDIA GPU here" in (missing_gpu({}, dev, PRESENT) or "")


def test_a_driver_without_its_library(dev: Path) -> None:
    assert "libnone.so.1 is not installed" in (missing_gpu({}, dev, "libnone.so.1") or "")


def test_windows_has_one_node_for_all(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    assert missing_gpu({"CUDA_VISIBLE_DEVICES": "3"}, tmp_path, PRESENT) is None
    assert missing_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path, PRESENT) is not None


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_can_be_used_is_used(wanted: str) -> None:
    assert choose(wanted, None, None) == "cuda"


@pytest.mark.parametrize(("no_gpu", "no_package"), [("no GPU", None), (None, "no triton")])
def test_cuda_without_what_it_takes_is_told(no_gpu: str | None, no_package: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        choose("cuda", no_gpu, no_package)
    assert caught.value.message == f"--device cuda: {no_gpu or no_package}; give cpu or auto"


def test_auto_says_when_a_gpu_lies_idle(caplog: pytest.LogCaptureFixture) -> None:
    assert choose("auto", "no GPU", None) == "cpu"
    assert not caplog.records
    assert choose("auto", None, "triton is not installed") == "cpu"
    assert "there is a GPU, but triton is not installed" in caplog.text


def test_cpu_is_not_questioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "missing_gpu", lambda: pytest.fail("looked for a GPU"))
    assert find_device("cpu") == "cpu"


def test_a_missing_gpu_is_told_before_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "missing_gpu", lambda: "there is none")
    config = Config(model=ModelOptions(model="org/large"), parallel=ParallelOptions(device="cuda"))
    with pytest.raises(ConfigError, match="--device cuda: there is none"):
        resolve_config(config)


def test_resolved_says_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resolve_module, "find_device", lambda *_: "cuda")
    monkeypatch.setattr("zlm.models.config.load_spec", lambda path, **_: small_spec())
    config = Config(model=ModelOptions(model=str(tmp_path)))
    assert resolve_config(config).device == "cuda"


def test_a_cache_for_no_sequence_is_told_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resolve_module, "find_device", lambda *_: "cpu")
    monkeypatch.setattr("zlm.models.config.load_spec", lambda path, **_: small_spec())
    model = ModelOptions(model=str(tmp_path))
    config = Config(model=model, cache=CacheOptions(kv_cache_memory_bytes=1000))
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes 1000 is less than") as refused:
        resolve_config(config)
    least = int(refused.value.message.split("at least ")[1].split(":")[0])
    enough = Config(model=model, cache=CacheOptions(kv_cache_memory_bytes=least))
    assert resolve_config(enough).config.cache.kv_cache_memory_bytes == least


def test_flags_of_gpus_are_harmless_on_a_cpu_and_told() -> None:
    options = ComputeOptions(enforce_eager=True, deterministic=True, attention_backend="sdpa")
    config = Config(model=ModelOptions(model="M"), compute=options)
    lines = idle_flags(config, "cpu")
    assert [line.split()[0].rstrip(":") for line in lines] == [
        "--enforce-eager",
        "--deterministic",
        "--attention-backend",
    ]
    assert idle_flags(config, "cuda") == []
    assert idle_flags(Config(model=ModelOptions(model="M")), "cpu") == []


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("1", 1), ("0,1", 2), ("0,7,1", 1), ("GPU-a,GPU-b", 2), ("", 0)],
)
def test_as_many_gpus_are_counted_as_cuda_would_see(
    dev: Path, visible: str | None, count: int
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environment, dev) == count


def test_each_rank_has_a_gpu_of_its_own(dev: Path) -> None:
    check_number(2, num_gpus({}, dev))
    check_number(8, None)  # where they cannot be counted the driver will tell
    with pytest.raises(ConfigError, match=r"2 workers .*need a GPU each, and 1 GPU is visible"):
        check_number(2, num_gpus({"CUDA_VISIBLE_DEVICES": "1"}, dev))
