"""Two machines can tell whether they have the same checkpoint."""

import shutil
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from zlm.config import ModelOptions
from zlm.weights.fingerprint import fingerprint


@pytest.mark.parametrize("at", [0, -1])
def test_a_copy_is_the_same_and_other_weights_are_not(tmp_path: Path, at: int) -> None:
    folder, options = tiny_checkpoint(tmp_path / "model", "llama"), ModelOptions(model="m")
    copy = shutil.copytree(folder, tmp_path / "copy")
    name = fingerprint(str(folder), options)
    assert fingerprint(str(copy), options) == name
    file = copy / "config.json" if at == 0 else copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert fingerprint(str(copy), options) != name
