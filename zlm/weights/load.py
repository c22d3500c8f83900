"""Tensors of a checkpoint, one at a time, under one set of names and in one form.

``open_weights`` gives the same view of a safetensors folder and of a GGUF file: Hugging Face's
names and orientation. What converters to GGUF change is undone here: the interleaved rows of q and
k in the Llama family, the 1 added to Gemma's norms. Nothing is read before it is asked for, and
nothing is kept: a model that copies what it gets holds the weights once.

For a GPU, tensors are made there: a file's bytes go to it as they are (``feed``), quantized ones
too, which it dequantises in no time.

Which tensors a model must have is not known here; names() tells what there is.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.ops.block_matrix import BlockMatrix
from zlm.weights.encoder_names import ENCODERS, encoder_names, gguf_encoder_names
from zlm.weights.feed import Feeder
from zlm.weights.gguf import GGUFFile, TensorInfo
from zlm.weights.gguf_dequant import dequantize
from zlm.weights.gguf_matrix import PARTS, matrix as gguf_matrix
from zlm.weights.gguf_rows import FileRows
from zlm.weights.mxfp4 import MXFP4Weights
from zlm.weights.names import gguf_names, text_names
from zlm.weights.parts import chosen_matrix, read_part
from zlm.weights.quantized import QuantizedWeights
from zlm.weights.raw import RawFile
from zlm.weights.region import Choose, whole
from zlm.weights.safetensors import folder_tensors, naming, open_file, tensor_places

CPU = torch.device("cpu")
LEAST_RUN_BYTES = 64 << 10  # shorter ones are not read one by one: what lies between comes, too
INTERLEAVED = ("llama", "mixtral", "smollm3")  # families whose rows of q and k converters reorder


class Weights(Protocol):
    """An open checkpoint."""

    def names(self) -> list[str]:
        """Return the names of all tensors in the order in which they lie on disk."""

    def get(self, name: str) -> Tensor:
        """Return tensor *name*, a copy owned by the caller; KeyError if there is none."""

    def close(self) -> None:
        """Close the files."""


def open_weights(path: str | Path, spec: ModelSpec, device: torch.device = CPU) -> Weights:
    """Open the checkpoint at *path*, a local folder or GGUF file that *spec* describes.

    Its tensors come on *device*.

    Raises ModelError, naming the file, if a file is missing, cut short or damaged, or if a tensor
    has a type that cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        is_cpu = device.type == "cpu"
        stored = FolderWeights(path, spec) if is_cpu else FedFolderWeights(path, spec, device)
        if spec.quantization == "mxfp4":
            return MXFP4Weights(stored)
        if not spec.quantization:
            return stored
        return QuantizedWeights(stored, spec.quantization, static_inputs=spec.static_inputs)
    return GGUFWeights(path, spec, device)


class FolderWeights:
    """The safetensors files of a folder; tensors come in the type they are stored in.

    The library maps the file: a copy lets go of its pages as soon as the files are closed.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._paths = folder_tensors(folder)
        self._names = _folder_names(self._paths, spec)
        self._files = {path: open_file(path, "pt") for path in sorted(set(self._paths.values()))}

    def names(self) -> list[str]:
        return list(self._names)

    def get(self, name: str) -> Tensor:
        stored = self._names[name]
        path = self._paths[stored]
        with naming(path):
            return self._files[path].get_tensor(stored).clone()

    def part(self, name: str, choose: Choose) -> Tensor:
        """Return what *choose* names of tensor *name*: no more of the file is read."""
        stored = self._names[name]
        path = self._paths[stored]
        with naming(path):
            tensor = self._files[path].get_slice(stored)
            region = choose(tensor.get_shape())
            return self.get(name) if region is None else read_part(tensor, region)

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of tensor *name*."""
        stored = self._names[name]
        path = self._paths[stored]
        with naming(path):
            shape: Sequence[int] = self._files[path].get_slice(stored).get_shape()
        return shape

    def close(self) -> None:
        self._files = {}


class FedFolderWeights:
    """The safetensors files of a folder, for a GPU: tensors in the type they are stored in."""

    def __init__(self, folder: Path, spec: ModelSpec, device: torch.device) -> None:
        paths = folder_tensors(folder)
        self._names = _folder_names(paths, spec)
        self._paths = paths
        self._places = {path: tensor_places(path) for path in set(paths.values())}
        self._files = {path: RawFile(str(path)) for path in self._places}
        self._feeder = Feeder(device)

    def names(self) -> list[str]:
        return list(self._names)

    def get(self, name: str) -> Tensor:
        stored = self._names[name]
        path = self._paths[stored]
        place = self._places[path][stored]
        raw = self._feeder.read(self._files[path], (place.offset, place.num_bytes))
        return raw.view(getattr(torch, place.dtype)).view(place.shape)

    def part(self, name: str, choose: Choose) -> Tensor:
        """Return what *choose* names of tensor *name*: no more is read, unless it is in scraps."""
        stored = self._names[name]
        path = self._paths[stored]
        place = self._places[path][stored]
        region = choose(place.shape)
        if region is None:
            return self.get(name)
        outer, size = place.shape[: region.dim], place.shape[region.dim]
        runs = math.prod(outer)
        unit = place.num_bytes // max(runs * size, 1)  # bytes of one entry of the dimension
        shortest = min((last - first for first, last in region.ranges), default=0) * unit
        if not region.ranges or (region.dim and 0 < shortest < LEAST_RUN_BYTES):
            return read_part(self.get(name), region)
        spans = [
            (place.offset + (run * size + first) * unit, (last - first) * unit)
            for run in range(runs)
            for first, last in region.ranges
        ]
        raw = self._feeder.read(self._files[path], *spans)
        taken, inner = sum(b - a for a, b in region.ranges), place.shape[region.dim + 1 :]
        tensor = raw.view(getattr(torch, place.dtype)).view(*outer, taken, *inner)
        return read_part(tensor, replace(region, ranges=((0, taken),)))

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of tensor *name*."""
        stored = self._names[name]
        return self._places[self._paths[stored]][stored].shape

    def close(self) -> None:
        self._feeder.close()
        for file in self._files.values():
            file.close()


class GGUFWeights:
    """A GGUF file; tensors come dequantised, float32, in Hugging Face's form."""

    def __init__(self, path: Path, spec: ModelSpec, device: torch.device = CPU) -> None:
        file = GGUFFile(path)
        self._spec = spec
        self._tensors = file.tensors
        if spec.architecture in ENCODERS:
            self._names = gguf_encoder_names(file.tensors, spec.architecture)
        else:
            self._names = gguf_names(
                file.tensors, sandwich=spec.sandwich_norms, fused=spec.fused_products
            )
        self._file = RawFile(str(path))
        self._device = device
        self._feeder = None if device.type == "cpu" else Feeder(device)

    def names(self) -> list[str]:
        return list(self._names)

    def get(self, name: str) -> Tensor:
        info = self._tensors[self._names[name]]
        raw = self._raw(name, info)
        shape = _shape(name, info)
        if info.type == "F32":
            values = raw.view(torch.float32).view(shape)
        else:
            values = torch.empty(shape, device=self._device)
            dequantize(raw, info.type, values)
        if self._spec.norm_plus_one and name.endswith("norm.weight"):
            values -= 1.0
        return values

    def matrix(self, name: str, choose: Choose = whole) -> BlockMatrix | None:
        """Return what *choose* names of *name* as it is quantized; None if it is not."""
        info = self._tensors[self._names[name]]
        if info.type not in PARTS or len(info.shape) != 2:
            return None
        matrix = gguf_matrix(self._raw(name, info), info.type, info.shape)
        return chosen_matrix(matrix, choose)

    def rows(self, name: str) -> FileRows | None:
        """Return what reads rows of tensor *name* from the file, if that is better; CPU only."""
        info = self._tensors[self._names[name]]
        is_plain = self._device.type == "cpu" and not self._interleaved_heads(name)
        return FileRows(self._file.path, info) if is_plain and FileRows.takes(info) else None

    def _raw(self, name: str, info: TensorInfo) -> Tensor:
        """Return the encoded rows of tensor *name*, in Hugging Face's order."""
        if self._feeder is not None:
            raw = self._feeder.read(self._file, (info.offset, info.num_bytes))
        else:
            raw = _read(self._file, info.offset, info.num_bytes)
        heads = self._interleaved_heads(name)
        return _separate_halves(raw, heads, info.shape[0]) if heads else raw

    def _interleaved_heads(self, name: str) -> int:
        """Return the number of heads whose rows converters interleave in tensor *name*, or 0."""
        if self._spec.architecture not in INTERLEAVED:
            return 0
        if ".q_proj." in name:
            return self._spec.num_heads
        return self._spec.num_kv_heads if ".k_proj." in name else 0

    def close(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
        self._file.close()


def _folder_names(names: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    if spec.architecture in ENCODERS:
        return encoder_names(names, spec.architecture)
    return text_names(names)


def _shape(name: str, info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of tensor *name*; of a matrix with one row, files keep the row alone."""
    one_row = name.endswith("shared_expert_gate.weight")
    return (1, info.shape[-1]) if one_row else info.shape


def _read(file: RawFile, offset: int, num_bytes: int) -> Tensor:
    """Return *num_bytes* bytes at *offset* as a uint8 tensor."""
    raw = torch.empty(num_bytes, dtype=torch.uint8)
    file.read_into(memoryview(raw.numpy().data), offset)
    return raw


def _separate_halves(raw: Tensor, heads: int, num_rows: int) -> Tensor:
    """Undo the interleaving of each head's two halves, row by row, on encoded bytes.

    A GGUF row is a whole number of blocks, so rows can be moved before they are dequantised. Of a
    head with rows 0 1 2 3 4 5, stored as 0 3 1 4 2 5, this gives back 0 1 2 3 4 5.
    """
    rows = raw.view(heads, num_rows // heads // 2, 2, -1)
    return rows.transpose(1, 2).contiguous().view(-1)
