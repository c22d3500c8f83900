"""Checkpoints that several ranks share."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny_checkpoint


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a tiny checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = tiny_checkpoint(tmp_path_factory.mktemp(family) / "model", family)
        return made[family]

    return checkpoint
