"""GGUF files: metadata and tensor table, versions 2 and 3, little-endian. No torch.

The layout: magic, version, two counts, then key-value pairs, then one record a tensor (name, shape,
type, offset), then, aligned, the tensor data. Everything up to the data is parsed through a
mapping of the file that is released again; the data itself is only located here (``TensorInfo``),
and read by ``zlm.weights.raw``. What the tensors mean is not known here.

Every count and length is checked against what is left of the file before it is believed, so that a
damaged or cut file ends in a ModelError that names the file, never in a huge allocation.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zlm.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes, unless general.alignment says otherwise
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4  # arrays of arrays are legal, but no writer nests them

# Tensor types by number: name, elements in a block, bytes in a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
# Those that ``zlm.weights.gguf_dequant`` reads.
READABLE = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)

# Metadata value types by number: those of fixed size as numpy types, then the other two.
SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9
SMALLEST_PAIR = 8 + 4 + 1  # bytes: an empty key, a type, one byte of value
SMALLEST_TENSOR = 8 + 4 + 4 + 8  # bytes: an empty name, no dimensions, a type, an offset

_U64 = struct.Struct("<Q").unpack_from
_U32 = struct.Struct("<I").unpack_from


class TensorInfo(NamedTuple):
    """Where one tensor lies. ``shape`` is in torch's order: rows first, contiguous values last."""

    name: str
    type: str  # ggml's name of the type: F32, Q4_K, ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """What a GGUF file says about itself; immutable after construction, holds no open file.

    metadata: key to int, float, bool, str or list of those (token lists are plain lists).
    tensors: name to TensorInfo, in the file's order.
    Raises ModelError, naming the file, if it is not a readable GGUF file or is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            with open(self.path, "rb") as file:
                if file.read(4) != MAGIC:
                    raise ModelError(
                        f"{self.path} is not a GGUF file (it does not start with GGUF)"
                    )
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    parser = _Parser(self.path, data)
                    self.version = parser.version
                    self.metadata = parser.metadata()
                    self.tensors = parser.tensors(self.metadata)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror or error}") from error

    def key(self, name: str, default: Any = None) -> Any:
        """Return ``<architecture>.<name>`` of the metadata, or *default* if it is absent."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    @property
    def architecture(self) -> str:
        """The value of general.architecture, empty if it is absent."""
        return str(self.metadata.get("general.architecture", ""))


class _Parser:
    """A cursor over the mapped file. Owns nothing but its position."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = len(MAGIC)
        self.version = self.u32("version")
        if self.version not in VERSIONS:
            self.refuse_version()
        self.num_tensors = self.u64("tensor count")
        self.num_pairs = self.u64("metadata count")
        self.check_count("tensor count", self.num_tensors, SMALLEST_TENSOR)
        self.check_count("metadata count", self.num_pairs, SMALLEST_PAIR)

    def metadata(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for number in range(self.num_pairs):
            key = self.name(f"metadata key {number}")
            if key in values:
                raise self.damaged(f"key {key} is there twice")
            values[key] = self.value(self.u32(key), key, MAX_ARRAY_DEPTH)
        return values

    def tensors(self, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {alignment!r}, not a power of two")
        records = [self.tensor_record(number) for number in range(self.num_tensors)]
        start = -(-self.at // alignment) * alignment
        table: dict[str, TensorInfo] = {}
        for info in records:
            if info.offset % alignment:
                raise self.damaged(f"tensor {info.name} is not aligned to {alignment} bytes")
            if info.name in table:
                raise self.damaged(f"tensor {info.name} is there twice")
            end = start + info.offset + info.num_bytes
            if end > self.size:
                raise ModelError(
                    f"{self.path} is cut short: tensor {info.name} ends at byte {end}, the file "
                    f"has {self.size} (an unfinished download?)"
                )
            table[info.name] = info._replace(offset=start + info.offset)
        return table

    def tensor_record(self, number: int) -> TensorInfo:
        name = self.name(f"name of tensor {number}")
        num_dimensions = self.u32(f"tensor {name}")
        if num_dimensions > MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name} has {num_dimensions} dimensions")
        sizes = [self.u64(f"tensor {name}") for _ in range(num_dimensions)]
        type_number = self.u32(f"tensor {name}")
        offset = self.u64(f"tensor {name}")
        if type_number not in TENSOR_TYPES:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {type_number}")
        type_name, block, block_bytes = TENSOR_TYPES[type_number]
        elements = 1
        for size in sizes:
            elements *= size
        if (sizes[0] if sizes else 1) % block:
            raise self.damaged(f"a row of tensor {name} is no whole number of {type_name} blocks")
        shape = tuple(reversed(sizes))
        return TensorInfo(name, type_name, shape, offset, elements // block * block_bytes)

    # ------------------------------------------------------------------------------- values

    def value(self, kind: int, what: str, depth: int) -> Any:
        if kind in SCALARS:
            return self.scalars(SCALARS[kind], 1, what)[0]
        if kind == STRING:
            return self.strings(1, what)[0]
        if kind != ARRAY:
            raise self.damaged(f"{what} has the unknown type {kind}")
        if depth == 0:
            raise self.damaged(f"{what} is nested too deep")
        kind = self.u32(what)
        count = self.u64(what)
        if kind in SCALARS:
            return self.scalars(SCALARS[kind], count, what)
        if kind == STRING:
            return self.strings(count, what)
        self.check_count(what, count, 12)
        return [self.value(kind, what, depth - 1) for _ in range(count)]

    def scalars(self, dtype: np.dtype, count: int, what: str) -> list:
        self.check_count(what, count, dtype.itemsize)
        values = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return values

    def strings(self, count: int, what: str) -> list[str]:
        """Return *count* strings: one plain loop, about 0.35 µs a token of a vocabulary."""
        self.check_count(what, count, 8)
        data, at, size, length = self.data, self.at, self.size, _U64
        values: list[str] = []
        append: Callable[[str], None] = values.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                if at > size:
                    raise self.cut(what)
                append(str(data[start:at], "utf-8", "replace"))
        except struct.error as error:  # no room for the next length
            raise self.cut(what) from error
        self.at = at
        return values

    def name(self, what: str) -> str:
        return self.strings(1, what)[0]

    def u32(self, what: str) -> int:
        if self.at + 4 > self.size:
            raise self.cut(what)
        self.at += 4
        return _U32(self.data, self.at - 4)[0]

    def u64(self, what: str) -> int:
        if self.at + 8 > self.size:
            raise self.cut(what)
        self.at += 8
        return _U64(self.data, self.at - 8)[0]

    # ------------------------------------------------------------------------------- errors

    def check_count(self, what: str, count: int, least_bytes: int) -> None:
        if count * least_bytes > self.size - self.at:
            raise self.cut(f"{what} ({count} entries)")

    def refuse_version(self) -> None:
        swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise ModelError(
                f"{self.path} is a big-endian GGUF file, which is not supported: convert it for "
                "little-endian machines"
            )
        raise ModelError(
            f"{self.path} is GGUF version {self.version}; versions 2 and 3 are supported: "
            "convert the model again with a current converter"
        )

    def cut(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path} is cut short or damaged: {what} runs past its end at byte {self.size}"
        )

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {what}")
