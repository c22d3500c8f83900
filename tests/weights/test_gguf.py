"""The GGUF reader: equal to the reference reader, fast on big vocabularies, firm on damage."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tiny import finish_gguf

from zlm.errors import ModelError
from zlm.weights.gguf import TENSOR_TYPES, GGUFFile


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a value of every kind and three tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -3)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**62))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.text", "grüße 🦊")
    writer.add_array("t.strings", ["a", "", "▁the", "\x00", "<0xF0>"])
    writer.add_array("t.floats", [0.25, -1.0])
    writer.add_array("t.bools", [True, False, True])
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b.weight", np.ones((2, 2, 5), np.float16))
    q8 = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c.weight", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish_gguf(writer)
    return path


def test_values_of_every_kind(small_file: Path) -> None:
    file = GGUFFile(small_file)
    assert file.version == 3
    assert file.architecture == "llama"
    expected = {
        "t.u8": 200,
        "t.i8": -3,
        "t.u16": 60000,
        "t.i16": -30000,
        "t.u32": 4_000_000_000,
        "t.i32": -2_000_000_000,
        "t.u64": 2**63,
        "t.i64": -(2**62),
        "t.f32": 0.5,
        "t.f64": 0.1,
        "t.bool": True,
        "t.text": "grüße 🦊",
        "t.strings": ["a", "", "▁the", "\x00", "<0xF0>"],
        "t.floats": [0.25, -1.0],
        "t.bools": [True, False, True],
    }
    assert {key: file.metadata[key] for key in expected} == expected


def test_tensors_lie_where_the_file_says(small_file: Path) -> None:
    file = GGUFFile(small_file)
    assert {name: info.shape for name, info in file.tensors.items()} == {
        "a.weight": (3, 4),
        "b.weight": (2, 2, 5),
        "c.weight": (2, 64),
    }
    info = file.tensors["a.weight"]
    data = np.fromfile(small_file, "<f4", 12, offset=info.offset)
    assert data.tolist() == list(range(12))
    assert file.tensors["c.weight"].num_bytes == 2 * 2 * 34


def test_block_sizes_equal_the_reference() -> None:
    for number, (name, values, size) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (values, size)


def test_a_real_file_equals_the_reference_reader(smollm2_path: Path) -> None:
    file = GGUFFile(smollm2_path)
    reader = gguf.GGUFReader(smollm2_path)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"):
        assert file.metadata[key] == reader.fields[key].contents()
    scalars = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and field.types[0] != gguf.GGUFValueType.ARRAY
    }
    assert {key: file.metadata[key] for key in scalars} == scalars
    theirs = {t.name: (t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors}
    ours = {t.name: (t.type, t.offset, t.num_bytes) for t in file.tensors.values()}
    assert ours == theirs


def test_a_vocabulary_of_262144_is_read(gemma3_path: Path) -> None:
    file = GGUFFile(gemma3_path)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(file.metadata["tokenizer.ggml.scores"]) == 262144
    assert [tokens[i] for i in (0, 1, 2, 105, 106)] == [
        "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>",
    ]  # fmt: skip
    last = max(file.tensors.values(), key=lambda info: info.offset)
    assert 0 <= gemma3_path.stat().st_size - last.offset - last.num_bytes < 32


# ------------------------------------------------------------------------------------------ damage


def test_no_file_and_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*absent\.gguf: No such file"):
        GGUFFile(tmp_path / "absent.gguf")
    for content in (b"", b"GG", b"\x08\x00\x00\x00\x00\x00\x00\x00{}"):
        path = tmp_path / "other.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"other\.gguf is not a GGUF file"):
            GGUFFile(path)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (struct.pack("<I", 1), "GGUF version 1; versions 2 and 3 are supported"),
        (struct.pack("<I", 4), "GGUF version 4"),
        (struct.pack(">I", 3), "big-endian"),
        (struct.pack(">I", 2), "big-endian"),
    ],
)
def test_versions_refused(small_file: Path, tmp_path: Path, version: bytes, words: str) -> None:
    path = tmp_path / "version.gguf"
    path.write_bytes(b"GGUF" + version + small_file.read_bytes()[8:])
    with pytest.raises(ModelError, match=words):
        GGUFFile(path)


def test_cut_at_every_byte(small_file: Path, tmp_path: Path) -> None:
    content = small_file.read_bytes()
    last = max(info.offset + info.num_bytes for info in GGUFFile(small_file).tensors.values())
    path = tmp_path / "cut.gguf"
    for length in range(last):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(path)


def test_a_cut_download_is_told_as_such(small_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    last = GGUFFile(small_file).tensors["c.weight"]
    path.write_bytes(small_file.read_bytes()[: last.offset + 5])
    with pytest.raises(ModelError, match=r"tensor c\.weight ends at byte \d+, .*unfinished"):
        GGUFFile(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_is_a_model_error(small_file: Path, data: st.DataObject) -> None:
    content = bytearray(small_file.read_bytes())
    header_end = GGUFFile(small_file).tensors["a.weight"].offset
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, header_end - 1))
        content[place] = data.draw(st.sampled_from([0, 1, 9, 0x7F, 0x80, 0xFF]))
    path = small_file.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
    except ModelError as error:
        assert "damaged.gguf" in error.message
    else:
        size = len(content)
        assert all(t.offset + t.num_bytes <= size for t in file.tensors.values())
