"""Weights that another user owns, as a service meets them, which is not root."""

import os
import tempfile
from pathlib import Path

import pytest
import tiny

from zlm.errors import ModelError
from zlm.models.config import load_spec
from zlm.weights.load import open_weights

NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_of_another_user_is_told_as_such() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = tiny.tiny_checkpoint(name, "llama")
        folder.chmod(0o755)
        (folder / "config.json").chmod(0o644)
        (folder / "model.safetensors").chmod(0o600)
        spec = load_spec(str(folder))
        os.seteuid(NOBODY)
        try:
            with pytest.raises(ModelError, match=r"model\.safetensors: this user may not read it"):
                open_weights(str(folder), spec)
        finally:
            os.seteuid(0)
    with pytest.raises(ModelError, match=r"cannot read .*: No such file"):
        open_weights(str(Path(name)), spec)
