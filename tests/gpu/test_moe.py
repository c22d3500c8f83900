"""Mixtures of experts of real shapes against float64: plain weights, and codes of every kind."""

import pytest
import torch
from kernel_cases_gemm import relative_error
from kernel_cases_moe import CLAMPED, MixtureCase, mixed, mixture_both, routed, weights_of

QWEN3_30B = (128, 8, 2048, 768)  # experts, chosen of them, hidden size, width
MIXTRAL = (8, 2, 4096, 3584)  # a quarter of its width: the reference is in float64
GPT_OSS = (32, 4, 2880, 2880)
LLAMA4 = (16, 1, 5120, 1024)
CASES = [
    *(MixtureCase(tokens, *QWEN3_30B, kind) for tokens in (1, 9, 300) for kind in ("", "fp8")),
    *(MixtureCase(tokens, *QWEN3_30B, kind) for tokens in (1, 300) for kind in ("w4z", "blocks")),
    *(MixtureCase(tokens, *MIXTRAL, kind) for tokens in (1, 40) for kind in ("", "w4", "int8")),
    *(
        MixtureCase(tokens, *GPT_OSS, kind, CLAMPED, biases=True)
        for tokens in (1, 9, 300)
        for kind in ("", "mxfp4")
    ),
    *(
        MixtureCase(n, 16, 1, 5120, 1024, kind, of_inputs=True)
        for n in (3, 700)
        for kind in ("", "fp8")
    ),
]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[1])


@TYPES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixture(case: MixtureCase, dtype: torch.dtype) -> None:
    out, expected = mixture_both(case, dtype, "cuda")
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["", "fp8", "mxfp4"])
def test_a_fixed_token_has_the_same_bits_in_any_company(kind: str) -> None:
    case = MixtureCase(200, *(GPT_OSS if kind == "mxfp4" else QWEN3_30B), kind)
    generator = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(200, case.hidden, generator=generator, device="cuda").bfloat16()
    logits = torch.randn(200, case.count, generator=generator, device="cuda")
    weights, _ = weights_of(case, torch.bfloat16, "cuda")
    results = []
    for tokens in (200, 7):
        experts, shares = routed(logits[:tokens], case.chosen)
        out = torch.zeros(tokens, case.hidden, device="cuda")
        mixed(case, x[:tokens], weights, experts, shares, fixed=True)(out)
        results.append(out[:7])
    assert torch.equal(*results)
