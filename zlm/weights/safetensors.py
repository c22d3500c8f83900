"""Safetensors folders: which files belong to a checkpoint and where each tensor lies. No torch.

A file is an 8-byte length, a JSON header (name to dtype, shape, byte range), then the data. A
checkpoint is the one file of a folder, or what ``model.safetensors.index.json`` lists; files beside
it that the index does not name are stale and ignored. Headers are checked against file sizes, so a
cut download is told as such before anything is computed.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from zlm.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
DTYPES = {  # the format's names: torch's name, bytes a value
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.h5", "*.msgpack")


class StoredTensor(NamedTuple):
    """Where one tensor lies; ``dtype`` is torch's name."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file. Raises ModelError, naming it, if damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(f"{path} is cut short or no safetensors file ({size} bytes)")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(item, type=_Entry) for name, item in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} has a damaged header: {error}") from error
    start = 8 + length
    return {name: _stored(path, name, entry, start, size) for name, entry in entries.items()}


def _stored(path: Path, name: str, entry: _Entry, start: int, size: int) -> StoredTensor:
    if entry.dtype not in DTYPES:
        raise ModelError(
            f"{path}: tensor {name} has the type {entry.dtype}, which is not supported"
        )
    dtype, item_bytes = DTYPES[entry.dtype]
    begin, end = entry.data_offsets
    if begin < 0 or min(entry.shape, default=0) < 0:
        raise ModelError(f"{path} is damaged: tensor {name} has a negative place or size")
    if end - begin != math.prod(entry.shape) * item_bytes:
        raise ModelError(
            f"{path} is damaged: tensor {name} of shape {entry.shape} and type {entry.dtype} has "
            f"{end - begin} bytes"
        )
    if start + end > size:
        raise ModelError(
            f"{path} is cut short: tensor {name} ends at byte {start + end}, the file has {size} "
            "(an unfinished download?)"
        )
    return StoredTensor(str(path), dtype, tuple(entry.shape), start + begin, end - begin)


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


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of the checkpoint in *folder*, file after file, as they lie on disk."""
    paths, weight_map = weight_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, stored in sorted(read_header(path).items(), key=lambda item: item[1].offset):
            if weight_map.get(name, path.name) != path.name:
                continue  # the index takes this one from another file
            if name in tensors:
                raise ModelError(f"{path}: tensor {name} is in {tensors[name].path} as well")
            tensors[name] = stored
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise ModelError(
            f"{folder / weight_map[lost[0]]} lacks {lost[0]}, which the index puts there"
        )
    return tensors


def folder_dtype(folder: Path) -> str:
    """Return torch's name of the type that most bytes of the first weights file have."""
    sizes: dict[str, int] = {}
    for stored in read_header(weight_files(folder)[0][0]).values():
        sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.num_bytes
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
