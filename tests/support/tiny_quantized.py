"""Tiny checkpoints quantized: fp8 in blocks, fp8 with a scale a row, 4 bits in groups, MXFP4."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
# Of a gpt-oss: heads for 3 and 4 ranks, and 7 blocks of columns, which neither number divides.
UNEVEN = {"intermediate_size": 224, "num_attention_heads": 12, "num_key_value_heads": 1}
FORMS = {
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "fp8-rows": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "int4-groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


def quantized(plain: Path, folder: Path, form: str) -> Path:
    """Write *plain*'s form, a key of FORMS, to *folder* and return it."""
    folder.mkdir()
    for path in plain.iterdir():
        if path.suffix in (".json", ".jinja"):
            (folder / path.name).write_text(path.read_text())
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = tensor
            continue
        base = name.removesuffix("weight")
        stored |= {base + part: value for part, value in _parts(tensor.float(), form).items()}
    save_file(stored, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = FORMS[form]
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def with_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Put random MXFP4 in the place of gpt-oss's experts in *folder*; return what is stored."""
    generator = torch.Generator().manual_seed(0)
    stored = load_file(folder / "model.safetensors")
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        assert columns % 32 == 0
        shape = experts, rows, columns // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return stored


def _parts(weight: Tensor, form: str) -> dict[str, Tensor]:
    rows, columns = weight.shape
    if form == "fp8-blocks":
        blocks = torch.nn.functional.pad(weight, (0, -columns % 32, 0, -rows % 32))
        scales = blocks.unflatten(1, (-1, 32)).unflatten(0, (-1, 32)).abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :columns]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales}
    if form == "fp8-rows":
        scales = weight.abs().amax(1, keepdim=True) / 448
        return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2) / 7
    codes = (groups / scales[..., None]).round().flatten(1).to(torch.int64) + 8
    words = sum(codes[:, i::8] << (4 * i) for i in range(8))
    assert isinstance(words, Tensor)
    words = torch.where(words < 2**31, words, words - 2**32)
    shape = torch.tensor([rows, columns])
    return {"weight_packed": words.int(), "weight_scale": scales, "weight_shape": shape}
