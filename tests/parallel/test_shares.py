"""What each rank gets of a model, and which models cannot be shared out to how many."""

import math

import pytest
from msgspec.structs import replace
from tiny_models import EXPERTS, SPECS

from zlm.errors import ConfigError
from zlm.models import shares
from zlm.models.tensors import expected_tensors
from zlm.weights.region import Region


@pytest.mark.parametrize(
    ("name", "facts", "ranks", "message"),
    [
        ("llama", {}, 3, "-size 3 does not divide the model's 4 attention heads"),
        ("llama", {"intermediate_size": 42}, 4, "divide the model's 42 columns of its MLPs"),
        (
            "llama",
            {"num_heads": 12, "num_kv_heads": 3},
            2,
            "neither divides the model's 3 KV heads",
        ),
        (
            "mixtral",
            {"experts": replace(EXPERTS, size=6)},
            4,
            "the model's 6 columns of its expert",
        ),
    ],
)
def test_a_number_of_ranks_that_does_not_fit(
    name: str, facts: dict[str, object], ranks: int, message: str
) -> None:
    spec = replace(SPECS[name], **facts)
    shares.check(spec, 1)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {ranks}") as error:
        shares.check(spec, ranks)
    assert message in error.value.message


@pytest.mark.parametrize("name", SPECS)
def test_every_product_is_shared_out_without_rest(name: str) -> None:
    spec, ranks = SPECS[name], 2
    for tensor, shape in expected_tensors(spec).items():
        regions = [shares.region(spec, tensor, shape, rank, ranks) for rank in range(ranks)]
        found = [region for region in regions if region is not None]
        if any(part in tensor for part in ("_proj.weight", "embed_tokens", "lm_head")):
            assert len(found) == ranks, tensor
        is_of_kv = any(part in tensor for part in (".k_", ".v_"))
        if len(found) == ranks and not (is_of_kv and spec.num_kv_heads < ranks):
            kept = [sum(b - a for a, b in region.ranges) for region in found]
            assert sum(kept) == shape[found[0].dim], tensor


@pytest.mark.parametrize(
    ("name", "stages", "message"),
    [
        ("llama", 3, "the model has 2 layers"),
        ("gemma3", 2, "each stage needs layers of every kind"),
        ("gemma4", 2, "must all be in one process"),
    ],
)
def test_a_number_of_stages_that_does_not_fit(name: str, stages: int, message: str) -> None:
    shares.check_stages(SPECS[name], 1)
    with pytest.raises(ConfigError, match=f"--pipeline-parallel-size {stages}.*{message}"):
        shares.check_stages(SPECS[name], stages)


def test_every_layer_is_one_stages() -> None:
    spec = replace(SPECS["gpt-oss"], num_layers=7, layer_windows=(6, 0, 6, 0, 6, 0, 6))
    bounds = [shares.layers_of_stage(spec, stage, 3) for stage in range(3)]
    assert bounds == [(0, 2), (2, 4), (4, 7)] and shares.largest_stage(spec, 3) == 2
    windows = (6, 0, 0, 0, 6, 0)  # as many layers each: most keys and values are the second's
    assert shares.largest_stage(replace(spec, num_layers=6, layer_windows=windows), 3) == 1
    last = shares.spec_of_stage(spec, 4, 7)
    assert last.num_layers == 3 and last.layer_windows == (6, 0, 6)
    assert shares.moved_layer("model.layers.2.mlp.experts.5.gate_proj.weight", 4) == (
        "model.layers.6.mlp.experts.5.gate_proj.weight"
    )
    assert shares.moved_layer("model.norm.weight", 4) == "model.norm.weight"


def test_a_rank_computes_a_share_of_the_work() -> None:
    spec = SPECS["gpt-oss"]
    whole, part = (
        sum(math.prod(shape) for shape in expected_tensors(each).values())
        for each in (spec, shares.spec_of_rank(spec, 4))
    )
    assert part < 0.6 * whole
    assert shares.vocabulary_rows(33, 4) == 16 and shares.vocabulary_rows(128256, 2) == 64128


def test_mxfp4_experts_have_whole_blocks() -> None:
    """gpt-oss-120b's 90 blocks on 4 and 8 ranks; what is not MXFP4 is shared out evenly."""
    spec = replace(SPECS["gpt-oss"], experts=replace(EXPERTS, size=2880, layout="fused"))
    assert [shares.expert_columns(spec, ranks) for ranks in (1, 4, 8)] == [2880, 720, 360]
    spec = replace(spec, quantization="mxfp4")
    assert [shares.expert_columns(spec, ranks) // 32 for ranks in (1, 4, 8)] == [90, 23, 12]
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (8, 2880, 5760)
    regions = [shares.region(spec, name, shape, rank, 4) for rank in (0, 3)]
    assert regions == [Region(2, ((0, 1472),)), Region(2, ((4416, 5760),), 128)]
