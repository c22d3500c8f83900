"""Issue 6: SmolLM2 in the layouts of published checkpoints, as likely to say a text as in bfloat16.

Its GGUF file's weights are written in bfloat16, quantized from there, and served as they would be:
on a CPU with the products for it from the codes, int8 and 4 bits.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from paged_steps import PagedSequences
from quantizers import CASES, quantized
from safetensors.torch import save_file
from transformers_reference import common_keys

from zlm.config import ModelSpec
from zlm.models import registry
from zlm.models.config import load_spec
from zlm.ops.cpu import CpuOps
from zlm.ops.cpu_codes import MOST_ROWS
from zlm.ops.cpu_native import NativeKernels
from zlm.ops.cpu_quantized import is_usable
from zlm.ops.kv_cache import FP8
from zlm.tokenizer.load import load_vocabulary
from zlm.weights.load import QuantizedWeights, open_weights

TEXT = Path(__file__).parent.parent / "clients" / "lighthouse.txt"
NUM_TOKENS = 200
MOST = {  # times the perplexity in bfloat16
    "compressed-int8": 1.03,
    "compressed-fp8-channel": 1.03,
    "awq": 1.12,
    "gptq": 1.12,
}


def config_json(spec: ModelSpec) -> dict[str, object]:
    return {
        **common_keys(spec),
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": spec.rope.theta,
        "torch_dtype": "bfloat16",
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0],
    }


def losses(
    folder: Path,
    ids: list[int],
    kv_dtype: torch.dtype = torch.bfloat16,
    native: NativeKernels | None = None,
) -> torch.Tensor:
    """Return what each of *ids* but the first costs, in nats, in a model served from *folder*.

    With the kernels *native* steps are short enough for codes of 4 bits.
    """
    step = 50 if native is None else MOST_ROWS
    spec = load_spec(folder)
    keeps = spec.quantization is not None and is_usable()
    weights = open_weights(folder, spec)
    ops = CpuOps(torch.bfloat16, kv_dtype=kv_dtype, quantized=keeps, native=native)
    matrix = weights.matrix if keeps and isinstance(weights, QuantizedWeights) else None
    model = registry.build(spec, weights, ops=ops, max_model_len=256, quantized=matrix)
    sequences = PagedSequences(model, spec, dtype=kv_dtype, ops=ops)
    logits = torch.cat(
        [sequences.step([(0, ids[at : at + step])])[0] for at in range(0, len(ids), step)]
    )
    return -logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])


@pytest.fixture(scope="module")
def plain(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], float]:
    """SmolLM2 as a folder in bfloat16, a text, and the mean loss of a token of it."""
    spec = load_spec(smollm2_path)
    stored = open_weights(smollm2_path, spec)
    folder = tmp_path_factory.mktemp("smollm2")
    tensors = {name: stored.get(name).bfloat16().contiguous() for name in stored.names()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(spec)))
    ids = load_vocabulary(str(smollm2_path)).encode(TEXT.read_text())[:NUM_TOKENS]
    return folder, ids, losses(folder, ids).mean().item()


SLOW = ("gptq",)  # as AWQ, but for how codes are laid out


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MOST]
)
def test_perplexity(
    plain: tuple[Path, list[int], float], tmp_path: Path, case: str, native_kernels: NativeKernels
) -> None:
    folder, ids, exact = plain
    quantized(folder, tmp_path / "quantized", *CASES[case])
    loss = losses(tmp_path / "quantized", ids, native=native_kernels).mean().item()
    assert math.exp(loss - exact) < MOST[case]


def test_perplexity_with_a_cache_of_fp8(plain: tuple[Path, list[int], float]) -> None:
    """Without scales: keys and values as they are, in 8 bits."""
    folder, ids, exact = plain
    assert math.exp(losses(folder, ids, FP8).mean().item() - exact) < 1.03
