"""Tables of every rope scaling against transformers' frequencies, and the order of pairs."""

import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zlm.config import RopeSpec
from zlm.layers.rotary import interleave, rotary_table
from zlm.ops.cpu_rotary import factors, rotate

HEAD_DIM = 32
SHORT = tuple(1.0 + 0.1 * i for i in range(16))
LONG = tuple(2.0 + 0.7 * i for i in range(16))

# name: our fields beside theta and scaling; transformers' names follow from them
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position": 128},
    "yarn mscale": {
        "factor": 40.0,
        "original_max_position": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn untruncated": {"factor": 4.0, "original_max_position": 128, "truncate": False},
    "yarn attention": {"factor": 4.0, "original_max_position": 128, "attention_factor": 1.3},
    "yarn small": {"factor": 0.5, "original_max_position": 128},
    "longrope": {
        "factor": 8.0,
        "original_max_position": 64,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
    "longrope attention": {
        "factor": 8.0,
        "original_max_position": 64,
        "attention_factor": 1.19,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
}


def theirs(kind: str, fields: dict[str, Any], length: int) -> torch.Tensor:
    """Return transformers' table for positions 0 .. length - 1."""
    parameters = {"rope_type": kind, "rope_theta": 10000.0}
    for name, value in fields.items():
        name = "original_max_position_embeddings" if name == "original_max_position" else name
        parameters[name] = list(value) if isinstance(value, tuple) else value
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.complex(angles.cos() * factor, angles.sin() * factor)


@pytest.mark.parametrize("length", [64, 300])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings(name: str, length: int) -> None:
    kind = name.split()[0]
    rope = RopeSpec(scaling=kind, **SCALINGS[name])
    table = rotary_table(rope, HEAD_DIM, length)
    torch.testing.assert_close(
        torch.view_as_real(table),
        torch.view_as_real(theirs(kind, SCALINGS[name], length)),
        rtol=1e-5,
        atol=5e-5,
    )


def test_plain_and_partial() -> None:
    table = rotary_table(RopeSpec(theta=500.0, partial_factor=0.25), HEAD_DIM, 50)
    angles = torch.outer(torch.arange(50).float(), 500.0 ** -(torch.arange(4) / 4))
    torch.testing.assert_close(table[:, :4].imag, angles.sin(), rtol=1e-5, atol=1e-5)
    assert (table[:, 4:] == 1).all()


@pytest.mark.parametrize(("length", "word"), [(64, "short"), (65, "long")])
def test_longrope_says_which_list_serves(
    caplog: pytest.LogCaptureFixture, length: int, word: str
) -> None:
    rope = RopeSpec(scaling="longrope", **SCALINGS["longrope"])
    with caplog.at_level(logging.INFO):
        rotary_table(rope, HEAD_DIM, length)
    assert f"the {word} factors" in caplog.text


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_interleaved_heads_rotate_as_halves_do(partial: float) -> None:
    """Scores of rotated q and k equal those of Hugging Face's rotate-half form."""
    rope = RopeSpec(partial_factor=partial)
    width = int(HEAD_DIM * partial)
    q, k = torch.randn(2, 6, 3 * HEAD_DIM)
    table = rotary_table(rope, HEAD_DIM, 6)

    def half_form(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(6, 3, HEAD_DIM)
        part, rest = heads[..., :width], heads[..., width:]
        turns = table[:, : width // 2]
        cos, sin = (f.repeat(1, 2)[:, None] for f in (turns.real, turns.imag))
        first, second = part.chunk(2, -1)
        turned = part * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((turned, rest), -1)

    def pair_form(x: torch.Tensor) -> torch.Tensor:
        rows = interleave(x.t().contiguous(), HEAD_DIM, rope).t().contiguous()
        return rotate(rows, factors(table, torch.arange(6), 6, 3, 0)).view(6, 3, HEAD_DIM)

    expected = torch.einsum("qhd,khd->hqk", half_form(q), half_form(k))
    actual = torch.einsum("qhd,khd->hqk", pair_form(q), pair_form(k))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
