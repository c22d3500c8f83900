"""Quantized checkpoints as tests need them: what each method stores of a weight, and what it means.

compressed-tensors' library writes and reads its formats; AWQ's and GPTQ's are written here, code
by code, as their publications and tools lay them out.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

GROUP = 64
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # row of each nibble of a word, lowest first

Parts = dict[str, torch.Tensor]
Quantizer = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]


def signed(words: torch.Tensor) -> torch.Tensor:
    """Return int64 words of 32 bits as the int32 that files hold."""
    return (words & 0xFFFFFFFF).to(torch.int64).where(words < 2**31, words - 2**32).to(torch.int32)


def grouped(weight: torch.Tensor, groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Return codes [N, K], zeros and scales [N, G] of a min-max rounding by column groups."""
    rows, count, top = weight.shape[0], int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(rows, count), torch.empty(rows, count)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=1e-3)
        scales[:, group] = ((high - low) / top).half().float()
        zeros[:, group] = (-low / scales[:, group]).round().clamp(1, top)
    spread, offset = scales[:, groups], zeros[:, groups]
    codes = (weight / spread + offset).round().clamp(0, top)
    return codes.long(), zeros.long(), scales, (codes - offset) * spread


def awq(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    rows, columns = weight.shape
    codes, zeros, scales, expected = grouped(weight, torch.arange(columns) // GROUP, 4)

    def pack(values: torch.Tensor) -> torch.Tensor:
        words = torch.zeros(values.shape[0], rows // 8, dtype=torch.int64)
        for nibble, row in enumerate(AWQ_ORDER):
            words |= values[:, row::8] << (4 * nibble)
        return signed(words)

    parts = {"qweight": pack(codes.t()), "qzeros": pack(zeros.t())}
    return parts | {"scales": scales.t().contiguous().half()}, expected


def gptq(bits: int, *, act_order: bool, stored_less: int) -> Quantizer:
    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        columns = weight.shape[1]
        groups = torch.arange(columns) // GROUP
        if act_order:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        codes, zeros, scales, expected = grouped(weight, groups, bits)

        def pack(values: torch.Tensor) -> torch.Tensor:  # along the last dimension
            per = 32 // bits
            words = torch.zeros(*values.shape[:-1], values.shape[-1] // per, dtype=torch.int64)
            for i in range(per):
                words |= values[..., i::per] << (bits * i)
            return signed(words)

        parts = {
            "qweight": pack(codes).t().contiguous(),
            "qzeros": pack(zeros.t() - stored_less),
            "scales": scales.t().contiguous().half(),
            "g_idx": groups.int(),
        }
        return parts, expected

    return quantize


def scaled(block: tuple[int, int], scale_name: str, *, flat: bool = False) -> Quantizer:
    """Float8 with a scale for each *block* of rows and columns; 0: all of them."""

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        rows, columns = weight.shape
        high, wide = block[0] or rows, block[1] or columns
        scales = torch.empty(-(-rows // high), -(-columns // wide))
        codes, expected = torch.empty(rows, columns), torch.empty(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scales[i, j] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn).float()
                expected[at] = codes[at] * scales[i, j]
        stored = scales.flatten()[0] if flat else scales
        return {"weight": codes.to(torch.float8_e4m3fn), scale_name: stored.clone()}, expected

    return quantize


def compressed(form: str, **arguments: object) -> Quantizer:
    """Let the library write, and say what it would read."""

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        library = pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        assert library.__version__
        args = QuantizationArgs(**arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        rows, columns = weight.shape
        size = args.group_size if args.strategy == "group" else columns
        folded = weight.view(rows, columns // size, size)
        if args.strategy == "tensor":
            folded = weight.view(1, 1, -1)
        scale, zero = calculate_qparams(folded.amin(-1), folded.amax(-1), args)
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form)
        parts = compressor.compress(dict(state), scheme)
        expected = compressor.decompress(dict(parts), scheme)["weight"]
        return dict(parts), expected.float()

    return quantize


BLOCK = (128, 128)
CASES: dict[str, tuple[dict[str, object], Quantizer]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "GEMM"}, awq),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        gptq(4, act_order=False, stored_less=1),
    ),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        gptq(4, act_order=True, stored_less=1),
    ),
    "gptq-8-bit": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
        gptq(8, act_order=True, stored_less=1),
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        gptq(4, act_order=False, stored_less=0),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, scaled((1, 0), "weight_scale")),
    "fp8-tensor": ({"quant_method": "fp8"}, scaled((0, 0), "weight_scale", flat=True)),
    "fp8-block": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
        scaled(BLOCK, "weight_scale_inv"),
    ),
} | {
    f"compressed-{name}": ({"quant_method": "compressed-tensors", "format": form}, quantizer)
    for name, form, quantizer in [
        (
            "w4a16",
            "pack-quantized",
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
        ),
        (
            "w4a16-zeros",
            "pack-quantized",
            compressed(
                "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False
            ),
        ),
        ("w8a16", "pack-quantized", compressed("pack-quantized", num_bits=8, strategy="channel")),
        ("int8", "int-quantized", compressed("int-quantized", num_bits=8, strategy="channel")),
        (
            "fp8-channel",
            "float-quantized",
            compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        ),
        (
            "fp8-tensor",
            "float-quantized",
            compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        ),
    ]
}


def quantized(
    plain: Path, folder: Path, config: dict[str, object], quantize: Quantizer
) -> dict[str, torch.Tensor]:
    """Write the quantized form of *plain* to *folder*; return the weights that it stands for."""
    folder.mkdir()
    for path in plain.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_text(path.read_text())
    tensors, stored, expected = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if "proj" not in name:
            stored[name] = expected[name] = tensor
            continue
        parts, expected[name] = quantize(tensor.float())
        parts |= {"input_scale": torch.ones(1)} if "weight_scale" in parts else {}
        base = name.removesuffix("weight")
        stored |= {base + part: value.contiguous() for part, value in parts.items()}
    save_file(stored, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return expected
