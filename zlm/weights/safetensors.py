"""Safetensors folders: which files belong to a checkpoint and which tensors they hold. No torch.

A checkpoint is the one file of a folder, or what ``model.safetensors.index.json`` lists; files
beside it that the index does not name are stale and ignored. The safetensors library reads the
files and checks their headers against their sizes, so a cut download is told as such before
anything is computed.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from zlm.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_NAMES = {  # the format's names of types, as torch calls them
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
HEADER_LENGTH_BYTES = 8  # little-endian, before the header
OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.h5", "*.msgpack")


class TensorPlace(NamedTuple):
    """Where one tensor lies in its file. ``dtype`` is torch's name of its type."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what goes wrong with the file *path* into a ModelError that names it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if not os.access(path, os.R_OK, effective_ids=True) and os.path.exists(path):
            reason = "this user may not read it"  # for the library such a file does not exist
        raise ModelError(f"cannot read {path}: {reason}") from error
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short: {error}") from error


def open_file(path: Path, framework: str) -> Any:
    """Open one safetensors file for *framework* (pt, or numpy where torch is not wanted)."""
    with naming(path):
        return safe_open(path, framework=framework)


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """Return where each tensor of a safetensors file lies.

    Raises ModelError for a type that torch lacks. The library must have opened the file before: it
    checks that offsets, shapes and sizes agree.
    """
    with naming(path), path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        header: dict[str, Any] = msgspec.json.decode(file.read(length))
    start = HEADER_LENGTH_BYTES + length
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = TORCH_NAMES.get(entry["dtype"])
        if dtype is None:
            raise ModelError(f"{path}: tensor {name} has the type {entry['dtype']}")
        first, end = entry["data_offsets"]
        places[name] = TensorPlace(dtype, tuple(entry["shape"]), start + first, end - first)
    return places


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the safetensors files of *folder* and, if it has an index, tensor name to file name.

    Raises ModelError if there are none, if a listed one is missing, or if it is not clear which of
    several belong to the model.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = _read_index(index)
        paths = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelError(
                f"{folder} is incomplete: {INDEX_NAME} lists {len(paths)} files, of which "
                f"{', '.join(missing)} is missing"
            )
        return paths, weight_map
    single = folder / SINGLE_NAME
    if single.is_file():
        return [single], {}
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found, {}
    if found:
        names = ", ".join(path.name for path in found)
        raise ModelError(f"{folder} holds {names} but neither {SINGLE_NAME} nor {INDEX_NAME}")
    raise ModelError(f"{folder} holds no safetensors weights{_what_else(folder)}")


def folder_tensors(folder: Path) -> dict[str, Path]:
    """Return all tensors of the checkpoint in *folder* with the file each is in, in disk order."""
    paths, weight_map = weight_files(folder)
    tensors: dict[str, Path] = {}
    for path in paths:
        for name in open_file(path, "numpy").offset_keys():
            if weight_map.get(name, path.name) != path.name:
                continue  # the index takes this one from another file
            if name in tensors:
                raise ModelError(f"{path}: tensor {name} is in {tensors[name]} as well")
            tensors[name] = path
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise ModelError(
            f"{folder / weight_map[lost[0]]} lacks {lost[0]}, which the index puts there"
        )
    return tensors


def folder_dtype(folder: Path) -> str:
    """Return torch's name of the type that most values of the first weights file have."""
    file = open_file(weight_files(folder)[0][0], "numpy")
    sizes: dict[str, int] = {}
    for name in file.offset_keys():
        stored = file.get_slice(name)
        dtype = TORCH_NAMES.get(stored.get_dtype(), stored.get_dtype())
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(stored.get_shape())
    return max(sizes, key=lambda name: sizes[name]) if sizes else "float32"


def _read_index(path: Path) -> dict[str, str]:
    try:
        content: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{path} lists the file {name!r}, which is no plain file name")
    return weight_map


def _what_else(folder: Path) -> str:
    for pattern in OTHER_WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            return (
                f", only {path.name}: weights in pickle or other old formats are not loaded. "
                "Convert the model to safetensors, or take a repository that has them"
            )
    return ""
