"""Hugging Face ids, with the real huggingface_hub against a hub on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_files import LLAMA
from fake_hub import TOKEN, FakeHub
from huggingface_hub import constants

from zlm.cli import pull
from zlm.errors import ModelError
from zlm.weights.hub import TOKEN_VARIABLES
from zlm.weights.resolve import resolve_model, resolve_tokenizer

MODEL = "owner/model"
WEIGHTS = bytes(range(256)) * 1000
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "chat_template.jinja": b"x",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": b"twice",
    "pytorch_model.bin": b"pickle",
    "original/params.json": b"{}",
    "README.md": b"read me",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    server.repositories[MODEL] = dict(FILES)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the suite itself may be run offline
    for variable in (*TOKEN_VARIABLES, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    yield server
    server.close()


def test_only_what_is_needed_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    folder = Path(resolve_model(MODEL))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    expected = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == expected
    assert set(hub.fetched()) == expected
    assert folder.is_relative_to(tmp_path / "cache")
    hub.requests.clear()
    assert resolve_model(MODEL) == str(folder)
    assert hub.fetched() == []


def test_a_download_is_told_in_words(hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    """The first bytes are told at once, by a line and not by bars."""
    hub.repositories[MODEL] = {**FILES, "model.safetensors": WEIGHTS * 10}
    told: list[str] = []
    resolve_model(MODEL, report=told.append)
    assert len(told) == 1 and told[0].startswith(f"downloading {MODEL}: ")
    assert "%|" not in capfd.readouterr().err
    told.clear()
    resolve_model(MODEL, report=told.append)
    assert told == [], "everything is there already"


def test_modules_of_an_embedding_model_are_fetched(hub: FakeHub) -> None:
    modules = {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"dense",
        "2_Dense/pytorch_model.bin": b"pickle",
        "onnx/model.onnx": b"another format",
    }
    hub.repositories[MODEL] |= modules
    folder = Path(resolve_model(MODEL))
    assert (folder / "2_Dense" / "model.safetensors").read_bytes() == b"dense"
    assert (folder / "1_Pooling" / "config.json").is_file()
    assert not [name for name in hub.fetched() if name.endswith((".bin", ".onnx"))]


def test_download_dir_revision_and_tokenizer(hub: FakeHub, tmp_path: Path) -> None:
    keywords = {"revision": "main", "download_dir": str(tmp_path / "elsewhere")}
    folder = Path(resolve_tokenizer(MODEL, **keywords))
    assert folder.is_relative_to(tmp_path / "elsewhere")
    assert "model.safetensors" not in hub.fetched()
    assert resolve_model(MODEL, **keywords) == str(folder)
    assert (folder / "model.safetensors").is_file()
    with pytest.raises(ModelError, match="has no revision v9"):
        resolve_model(MODEL, revision="v9")


def test_a_cut_download_is_taken_up_where_it_broke(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cut_once["model.safetensors"] = 100_000
    folder = Path(resolve_model(MODEL))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [r for method, path, r in hub.requests if path.endswith("model.safetensors") and r]
    assert ranges == ["bytes=100000-"]


def test_a_file_that_came_damaged_is_named_and_fetched_again(hub: FakeHub) -> None:
    """Issue 6: of the size that was promised, with one bit that is another."""
    hub.damaged_once.add("model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors came damaged: its SHA-256 is"):
        resolve_model(MODEL)
    folder = Path(resolve_model(MODEL))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched().count("model.safetensors") == 2


def test_offline_with_the_files_there(hub: FakeHub) -> None:
    folder = resolve_model(MODEL)
    hub.close()
    assert resolve_model(MODEL) == folder
    assert resolve_tokenizer(MODEL) == folder


def test_offline_with_half_of_the_files(hub: FakeHub) -> None:
    resolve_tokenizer(MODEL)
    hub.close()
    with pytest.raises(ModelError, match=r"is not complete in .*cache.*cannot be reached"):
        resolve_model(MODEL)


def test_offline_with_nothing(hub: FakeHub) -> None:
    hub.close()
    with pytest.raises(ModelError, match=rf"{hub.url} cannot be reached"):
        resolve_model(MODEL)


def test_gated_models_need_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(MODEL)
    with pytest.raises(ModelError, match=r"is gated: accept its terms at .*HF_TOKEN.*no token"):
        resolve_model(MODEL)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match="the token in use has no access"):
        resolve_model(MODEL)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HUGGINGFACE_HUB_TOKEN", TOKEN)
    assert (Path(resolve_model(MODEL)) / "model.safetensors").is_file()


def test_no_such_id(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "owner" / "modell").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"no model owner/mudel at .*did you mean owner/modell\?"):
        resolve_model("owner/mudel")


def test_pickles_only(hub: FakeHub) -> None:
    hub.repositories["owner/old"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(ModelError, match=r"no safetensors.*only pytorch_model\.bin"):
        resolve_model("owner/old")


def test_gguf_repositories(hub: FakeHub) -> None:
    names = ["m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-f16.gguf", "mmproj-f16.gguf"]
    hub.repositories["owner/many"] = {name: name.encode() for name in names}
    hub.repositories["owner/one"] = {"config.json": b"{}", "only.gguf": b"GGUF"}
    for choice, name in {"Q4_K_M": names[1], "F16": names[2], names[0]: names[0]}.items():
        path = Path(resolve_model(f"owner/many:{choice}"))
        assert path.name == name and path.read_text() == name
    assert Path(resolve_model("owner/one")).name == "only.gguf"
    with pytest.raises(ModelError, match=r"3 GGUF files, name one as owner/many:FILE: .*Q4_K_M"):
        resolve_model("owner/many")
    with pytest.raises(ModelError, match=r"no GGUF file Q9.*m-Q4_K_S\.gguf"):
        resolve_model("owner/many:Q9")
    hub.close()
    assert Path(resolve_model("owner/one")).name == "only.gguf"
    assert Path(resolve_model("owner/many:Q4_K_M")).name == "m-Q4_K_M.gguf"


def test_a_disk_that_cannot_be_written(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ModelError, match="cannot store owner/model: Not a directory"):
        resolve_model(MODEL, download_dir=str(tmp_path / "file"))


def test_the_environment_of_a_fresh_process(hub: FakeHub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE work, and nothing heavy is imported for it."""
    code = (
        "import sys\nfrom zlm.weights.resolve import resolve_model\n"
        "assert 'huggingface_hub' not in sys.modules\nprint(resolve_model(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, MODEL]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment.pop("HF_HUB_CACHE", None)
    online = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    folder = Path(online.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    hub.requests.clear()
    environment["HF_HUB_OFFLINE"] = "1"
    offline = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert offline.stdout == online.stdout
    assert hub.requests == []


def test_pull_prints_where_the_model_is(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``zlm pull``; a model of an architecture that is not known is told at once."""
    config = LLAMA | {"max_position_embeddings": 8}
    hub.repositories[MODEL]["config.json"] = json.dumps(config).encode()
    assert pull.main([MODEL]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder == Path(resolve_model(MODEL)) and (folder / "model.safetensors").is_file()
    hub.repositories[MODEL]["config.json"] = b'{"architectures": ["OtherForCausalLM"]}'
    assert pull.main([MODEL, "--download-dir", str(tmp_path / "other")]) == 1
    assert "architecture OtherForCausalLM is not supported" in capsys.readouterr().err
    assert pull.main(["owner/none"]) == 1
