"""What a model's name means when it is, or looks like, something on this machine."""

from pathlib import Path

import pytest

from zlm.errors import ModelError
from zlm.weights.resolve import resolve_model, resolve_tokenizer


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_a_folder_with_safetensors(tmp_path: Path) -> None:
    folder = touch(tmp_path / "m", "config.json", "model.safetensors", "extra.gguf")
    assert resolve_model(str(folder)) == str(folder)
    assert resolve_model(f"{folder}/") == str(folder)


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    folder = touch(tmp_path / "g", "m.Q4_K_M.gguf", "config.json")
    file = str(folder / "m.Q4_K_M.gguf")
    assert resolve_model(file) == resolve_model(str(folder)) == file
    assert resolve_tokenizer(str(folder)) == file
    touch(folder, "tokenizer.json")
    assert resolve_tokenizer(str(folder)) == str(folder)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = touch(tmp_path / "m", "config.json", "model.safetensors")
    assert resolve_model("~/m") == str(folder)


def test_several_gguf_files_are_listed(tmp_path: Path) -> None:
    folder = touch(tmp_path, "a.gguf", "b.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        resolve_model(str(folder))


def test_a_weights_file_is_no_model(tmp_path: Path) -> None:
    file = touch(tmp_path, "model.safetensors") / "model.safetensors"
    with pytest.raises(ModelError, match="name the folder that holds it"):
        resolve_model(str(file))


def test_the_inside_of_a_cache_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b"
    touch(folder / "snapshots")
    with pytest.raises(ModelError, match=rf"--download-dir {tmp_path}"):
        resolve_model(str(folder))


@pytest.mark.parametrize("typed", ["./smolm2", "{tmp}/smolm2", "{tmp}/smolm2/", "a/b/smolm2"])
def test_a_mistyped_path_is_told_as_such(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "smollm2")
    touch(tmp_path / "a" / "b" / "smollm2")
    with pytest.raises(ModelError, match=r"no file or folder .*did you mean .*smollm2\?"):
        resolve_model(typed.format(tmp=tmp_path))


def test_a_mistyped_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(touch(tmp_path, "SmolLM2.Q4_1.gguf"))
    with pytest.raises(ModelError, match=r"did you mean SmolLM2\.Q4_1\.gguf"):
        resolve_model("SmolLM2.Q4_0.gguf")
    with pytest.raises(ModelError, match="there is no folder /nowhere/at/all either"):
        resolve_model("/nowhere/at/all/model.gguf")


@pytest.mark.parametrize("name", ["", "a b", "owner/na me", "-x", "owner/", "ünï/x", "a:b:c"])
def test_neither_path_nor_id(name: str) -> None:
    with pytest.raises(ModelError):
        resolve_model(name)
