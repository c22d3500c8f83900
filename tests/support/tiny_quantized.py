"""A tiny checkpoint quantized: fp8 in blocks, fp8 with a scale a row, 4 bits in groups."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
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
