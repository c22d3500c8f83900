"""Bytes of files in pieces, by several threads."""

import os
from pathlib import Path

import pytest
import torch

from zlm.errors import ModelError
from zlm.weights.feed import Feeder
from zlm.weights.raw import RawFile

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 640, 1000])
def test_every_byte_arrives_in_its_place(tmp_path: Path, num_bytes: int) -> None:
    content = os.urandom(1200)
    (tmp_path / "f").write_bytes(content)
    feeder = Feeder(CPU, piece_bytes=64, num_threads=3)
    with RawFile(str(tmp_path / "f")) as file:
        for offset in (0, 7, 150):
            read = feeder.read(file, (offset, num_bytes))
            assert read.numpy().tobytes() == content[offset : offset + num_bytes]
        read = feeder.read(file, (190, num_bytes), (3, 0), (5, 70))
        assert read.numpy().tobytes() == content[190 : 190 + num_bytes] + content[5:75]
    feeder.close()


def test_tensors_of_inference_mode_are_filled(tmp_path: Path) -> None:
    """As models are built: the threads that copy are told of the mode."""
    (tmp_path / "f").write_bytes(bytes(range(200)))
    feeder = Feeder(CPU, piece_bytes=64, num_threads=2)
    with RawFile(str(tmp_path / "f")) as file, torch.inference_mode():
        assert feeder.read(file, (3, 150)).tolist() == list(range(3, 153))
    feeder.close()


def test_a_file_that_ends_too_soon_is_named_and_the_feeder_goes_on(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(200))
    feeder = Feeder(CPU, piece_bytes=64, num_threads=2)
    with RawFile(str(tmp_path / "f")) as file:
        with pytest.raises(ModelError, match="f is cut short"):
            feeder.read(file, (100, 1000))
        assert feeder.read(file, (0, 200)).sum() == 0
    feeder.close()
