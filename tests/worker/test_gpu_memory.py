"""The share-out of a GPU's memory, without a GPU. CASES 99 (not enough memory) is told here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from zlm.config import (
    CacheOptions,
    ComputeOptions,
    Config,
    ExpertsSpec,
    ModelOptions,
    ModelSpec,
    ParallelOptions,
    Resolved,
    SchedulerOptions,
    resolve,
)
from zlm.errors import ConfigError
from zlm.worker import gpu_costs, gpu_memory
from zlm.worker.gpu_costs import Capacities, Card
from zlm.worker.gpu_memory import GpuPlan, Measured
from zlm.worker.memory_plan import GIB, GroupFacts

MIB = 2**20
LLAMA_8B = ModelSpec(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    rms_norm_eps=1e-5,
    checkpoint_dtype="bfloat16",
)
H200 = Card("NVIDIA H200", 140 * GIB, 140 * GIB - 500 * MIB)
SMALL = Card("NVIDIA GeForce RTX 3060", 12 * GIB, 12 * GIB - 300 * MIB, 28)


def resolved_of(spec: ModelSpec = LLAMA_8B, **parts: Any) -> Resolved:
    config = Config(model=ModelOptions(model="m", **parts.pop("model", {})), **parts)
    return resolve(config, spec, model_path="m", tokenizer_path="m", device="cuda")


def capacities_of(resolved: Resolved) -> Capacities:
    most = resolved.max_num_seqs
    return Capacities(resolved.max_num_batched_tokens + most, most, most + 1, 1024, 40)


def groups_of(resolved: Resolved, element_bytes: int = 2) -> list[GroupFacts]:
    size = resolved.config.cache.block_size_tokens
    return [
        GroupFacts(
            g.window_tokens,
            len(g.layers) * size * 2 * g.num_kv_heads * g.head_dim * element_bytes,
        )
        for g in resolved.kv_groups
    ]


def planned(resolved: Resolved, card: Card = H200) -> GpuPlan:
    costs = gpu_costs.costs(resolved, card, capacities_of(resolved), element_bytes=2)
    return gpu_memory.plan(resolved, card, costs, groups_of(resolved))


def refusal(resolved: Resolved, card: Card) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(resolved, card)
    return caught.value.message


def test_weights_of_a_known_model() -> None:
    parameters = 8_030_261_248  # as its publisher counts them
    rotary = 131072 * 64 * 8
    assert gpu_costs.weight_bytes(LLAMA_8B, 2, 131072) == 2 * parameters + rotary


def test_activations_are_the_formula() -> None:
    of_token = 2 * (6 * 4096 + 6144 + 4096 + 3 * 14336) + 2 * 2 * 4096 + 128
    logits = 256 * 128256 * 14
    assert gpu_costs.activation_bytes(LLAMA_8B, 2, 8192, 256) == 8192 * of_token + logits
    wide = 4 * (6 * 4096 + 6144 + 4096 + 3 * 14336) + 128
    assert gpu_costs.activation_bytes(LLAMA_8B, 4, 8192, 0) == 8192 * wide


def test_a_plan_uses_the_share_and_no_more() -> None:
    made = planned(resolved_of())
    used = made.costs.total + made.blocks.total_bytes
    assert made.budget_bytes == int(0.9 * H200.total_bytes)
    assert made.budget_bytes - made.blocks.groups[0].block_bytes < used <= made.budget_bytes
    assert 100 * GIB < made.blocks.total_bytes < 110 * GIB
    assert made.costs.weights == gpu_costs.weight_bytes(LLAMA_8B, 2, 131072)


def test_keys_and_values_of_fp8_are_widened_a_layer_at_a_time() -> None:
    """Issue 6: for contexts of 8 steps in all, or of one more than the longest, or little of a
    small card; not where no prompt would read them so."""
    fp8 = CacheOptions(kv_cache_dtype="fp8")
    steps = {"scheduler": SchedulerOptions(max_num_batched_tokens=4096)}
    token = 2 * 8 * 128 * 2
    long, short = (resolved_of(cache=fp8, **steps, model={"max_model_len": n}) for n in (-1, 8192))
    widened = gpu_costs.widened_bytes
    assert widened(long, 2, H200) == 8 * 4096 * token
    assert widened(short, 2, H200) == (8192 + 4096) * token
    tiny = Card("NVIDIA T400 4GB", 4 * GIB, 4 * GIB, 6)
    assert widened(long, 2, tiny) == 8 * MIB
    capacities = capacities_of(short)
    plain = resolved_of(**steps, model={"max_model_len": 8192})
    both = [gpu_costs.attention_bytes(each, 2, capacities, H200) for each in (short, plain)]
    assert both[0] - both[1] == widened(short, 2, H200)
    fixed = resolved_of(cache=fp8, **steps, compute=ComputeOptions(deterministic=True))
    gathers = resolved_of(cache=fp8, **steps, compute=ComputeOptions(attention_backend="sdpa"))
    old = Card("Tesla T4", 16 * GIB, 16 * GIB, 40, capability=(7, 5))
    assert not widened(fixed, 2, H200) and not widened(gathers, 2, H200)
    assert not widened(plain, 2, H200) and not widened(short, 4, H200)
    assert not widened(short, 2, old)


def test_what_was_seen_of_the_weights_replaces_the_count() -> None:
    resolved = resolved_of()
    capacities = capacities_of(resolved)
    costs = gpu_costs.costs(resolved, H200, capacities, element_bytes=2, weights=17 * GIB)
    assert costs.weights == 17 * GIB


@pytest.mark.parametrize(("inner", "each"), [(4096, 0.5), (3696, 1.0), (3700, 2.0)])
def test_codes_that_kernels_cannot_read_as_they_are_take_more(
    tmp_path: Path, inner: int, each: float
) -> None:
    """What 8 ranks have of columns by no 32 is kept in 8 bits, by no 16 in 16."""
    others = 2 * (2 * 16032 * 4096 + 65 * 4096) + 131072 * 64 * 8  # and rotary tables
    downs = 32 * 4096 * inner
    rest = 32 * (4096 * (512 + 2 * 128 + 512) + 2 * 4096 * inner)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(8 * (others + (downs + rest) // 2))  # 4 bits
    spec = replace_spec(quantization="awq", intermediate_size=inner, num_heads=4, num_kv_heads=1)
    parallel = ParallelOptions(tensor_parallel_size=8)
    resolved = msgspec.structs.replace(
        resolved_of(spec, parallel=parallel), model_path=str(tmp_path)
    )
    assert gpu_costs.stored_bytes(resolved, 2) == others + rest // 2 + int(downs * each)


def test_mxfp4_is_counted_by_shapes() -> None:
    experts = ExpertsSpec(count=128, chosen=4, normalize=True, size=736, layout="fused")
    spec = replace_spec(quantization="mxfp4", hidden_size=2880, experts=experts)
    values = 32 * 128 * 3 * 736 * 2880
    plain = gpu_costs.weight_bytes(spec, 2, 131072)
    assert gpu_costs.stored_bytes(resolved_of(spec), 2) == plain - values * (2 - 0.5625)
    dummy = {"load_format": "dummy"}
    assert gpu_costs.stored_bytes(resolved_of(spec, model=dummy), 2) == plain


def test_what_cannot_help_is_not_advised() -> None:
    """Smaller steps do not make room for weights that are more than the card."""
    message = refusal(resolved_of(), replace(SMALL, total_bytes=8 * GIB, free_bytes=8 * GIB))
    assert message.endswith("take a smaller or quantized model, a larger GPU, or several")


def test_codes_have_another_form_beside_them_where_that_is_little_of_the_card() -> None:
    online = resolved_of(model={"quantization": "w4a16", "load_format": "dummy"})
    products = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
    assert gpu_costs.spread_bytes(online, 2, H200) == 2 * products
    assert planned(online).costs.weights - gpu_costs.stored_bytes(online, 2) == 2 * products
    assert gpu_costs.spread_bytes(online, 2, SMALL) == 0  # too much of it
    assert gpu_costs.spread_bytes(online, 4, H200) == 0
    assert gpu_costs.spread_bytes(resolved_of(), 2, H200) == 0
    float8 = resolved_of(model={"quantization": "fp8", "load_format": "dummy"})
    assert gpu_costs.spread_bytes(float8, 2, H200) == 0
    experts = ExpertsSpec(count=8, chosen=2, normalize=True, size=14336)
    mixture = replace_spec(experts=experts)
    wanted = resolved_of(mixture, model={"quantization": "w4a16", "load_format": "dummy"})
    attention = 32 * 4096 * (6144 + 4096)
    assert gpu_costs.spread_bytes(wanted, 2, replace(H200, total_bytes=1000 * GIB)) == 2 * attention


def test_a_small_gguf_file_is_spread_out_unless_its_codes_are_asked_for() -> None:
    few = {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3}
    small = msgspec.structs.replace(LLAMA_8B, weights_format="gguf", vocab_size=49152, **few)
    large = msgspec.structs.replace(LLAMA_8B, weights_format="gguf")
    wanted = {"quantization": "gguf"}
    assert not gpu_costs.keeps_codes(resolved_of(small), 2)
    assert gpu_costs.keeps_codes(resolved_of(small, model=wanted), 2)
    assert not gpu_costs.keeps_codes(resolved_of(small, model=wanted), 4)
    assert gpu_costs.keeps_codes(resolved_of(large), 2)
    values = gpu_costs.weight_bytes(small, 2, 0)
    assert gpu_costs.stored_bytes(resolved_of(small), 2) >= values


def test_without_graphs_they_cost_nothing() -> None:
    resolved = resolved_of()
    none = replace(capacities_of(resolved), num_graphs=0)
    assert gpu_costs.costs(resolved, H200, none, element_bytes=2).graphs == 0
    some = gpu_costs.costs(resolved, H200, capacities_of(resolved), element_bytes=2).graphs
    assert some > gpu_costs.activation_bytes(LLAMA_8B, 2, 1024, 256)


def test_sdpa_needs_more() -> None:
    short = {"max_model_len": 8192}
    plain = planned(resolved_of(model=short)).costs.activations
    sdpa = resolved_of(model=short, compute=ComputeOptions(attention_backend="sdpa"))
    assert planned(sdpa).costs.activations - plain >= 2 * 8192 * 40 * 128 * 2
    old = replace(H200, capability=(7, 5))
    assert planned(resolved_of(model=short), old).costs == planned(sdpa, old).costs


def test_a_sliding_group_gets_no_more_than_it_can_use() -> None:
    spec = replace_spec(
        layer_windows=(512, 512, 512, 512, 512, 0) * 3,
        num_layers=18,
        hidden_size=640,
        intermediate_size=2048,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
    )
    made = planned(resolved_of(spec))
    full, sliding = made.blocks.num_blocks
    assert sliding < full
    assert made.blocks.total_bytes <= made.budget_bytes - made.costs.total


def replace_spec(**facts: Any) -> ModelSpec:
    return msgspec.structs.replace(LLAMA_8B, **facts)


def test_the_table_adds_up_and_names_the_parts() -> None:
    busy = replace(H200, free_bytes=H200.free_bytes - 5 * GIB)
    lines = planned(resolved_of(), busy).table()
    assert lines[0] == "NVIDIA H200: 140.0 GiB, of which zlm may use 90%"
    parts = [line for line in lines if line.endswith(" GiB")]
    assert sum(float(line.split()[-2]) for line in parts) == pytest.approx(140, abs=0.05)
    assert any(line.startswith("KV cache") for line in parts)
    others = next(line for line in parts if line.startswith("other processes"))
    assert float(others.split()[-2]) == pytest.approx(4.86, abs=0.01)
    assert "full" in lines[-1]  # the KV groups follow


# ------------------------------------------------------------------------------ what cannot be


def test_memory_that_others_hold_is_told_with_numbers() -> None:
    busy = replace(H200, free_bytes=100 * GIB, holders="process 77, vllm, 39 GiB")
    message = refusal(resolved_of(), busy)
    assert message.startswith(
        "--gpu-memory-utilization 0.9 wants 126.00 GiB of the 140.00 GiB of NVIDIA H200, but "
        "100.62 GiB are free: other processes hold 39.38 GiB (process 77, vllm, 39 GiB). End them"
    )
    proposed = float(message.rsplit(" ", 1)[1])
    assert proposed == 0.71
    cache = CacheOptions(gpu_memory_utilization=proposed)
    made = planned(resolved_of(cache=cache), busy)
    assert made.costs.total + made.blocks.total_bytes <= busy.available_bytes


def test_a_full_card_gets_no_silly_proposal() -> None:
    full = replace(H200, free_bytes=0, total_bytes=140 * GIB)
    assert "--gpu-memory-utilization 0 " not in refusal(resolved_of(), full)


def test_a_model_that_is_too_large_names_parts_and_flags() -> None:
    message = refusal(resolved_of(), SMALL)
    assert "the model does not fit the GPU" in message and "weights 15." in message
    assert "10.80 of 12.00 GiB" in message
    assert "--max-model-len" in message and "give --gpu-memory-utilization" not in message


def test_a_long_context_is_met_with_one_that_fits() -> None:
    card = Card("NVIDIA L4", 24 * GIB, 24 * GIB - 300 * MIB, 58)
    message = refusal(resolved_of(), card)
    proposed = int(message.split("give --max-model-len ")[1].split()[0])
    assert 1024 <= proposed < 131072
    made = planned(resolved_of(model={"max_model_len": proposed}), card)
    assert made.blocks.num_blocks[0] * 16 >= proposed


def test_a_share_that_is_too_small_is_met_with_one_that_is_not() -> None:
    message = refusal(resolved_of(cache=CacheOptions(gpu_memory_utilization=0.2)), H200)
    proposed = float(message.split("give --gpu-memory-utilization ")[1].split(",")[0])
    cache = CacheOptions(gpu_memory_utilization=proposed)
    assert planned(resolved_of(cache=cache)).blocks.num_blocks[0] * 16 >= 131072


def test_a_cache_of_a_given_size() -> None:
    made = planned(resolved_of(cache=CacheOptions(kv_cache_memory_bytes=20 * GIB)))
    assert 20 * GIB - 4 * MIB < made.blocks.total_bytes <= 20 * GIB
    small = CacheOptions(kv_cache_memory_bytes=GIB)
    assert "--kv-cache-memory-bytes" in refusal(resolved_of(cache=small), H200)
    large = CacheOptions(kv_cache_memory_bytes=130 * GIB)
    assert "exceeds" in refusal(resolved_of(cache=large), H200)


def test_a_given_size_asks_for_no_share() -> None:
    busy = replace(H200, free_bytes=60 * GIB)
    made = planned(resolved_of(cache=CacheOptions(kv_cache_memory_bytes=20 * GIB)), busy)
    assert made.costs.total + made.blocks.total_bytes < 61 * GIB


def test_a_number_of_blocks_is_taken_if_it_fits() -> None:
    made = planned(resolved_of(cache=CacheOptions(num_blocks_override=10)))
    assert made.blocks.num_blocks == (9,)
    many = CacheOptions(num_blocks_override=10**6)
    assert refusal(resolved_of(cache=many), H200).startswith("--num-gpu-blocks-override 1000000")


# --------------------------------------------------------------------------------- and afterwards


def test_what_a_step_took_is_compared() -> None:
    made = planned(resolved_of())
    free = made.card.available_bytes - made.costs.total - made.blocks.total_bytes
    lines = gpu_memory.verify(made, Measured(made.torch_bytes, free))
    assert len(lines) == 1 and "of the GPU are free" in lines[0]
    lines = gpu_memory.verify(made, Measured(made.torch_bytes - GIB, free - GIB))
    assert len(lines) == 2 and lines[1].startswith("1.00 GiB more of the GPU are held")


def test_more_than_planned_is_an_error_with_the_flag() -> None:
    made = planned(resolved_of())
    with pytest.raises(ConfigError) as caught:
        gpu_memory.verify(made, Measured(made.torch_bytes + 3 * GIB, GIB))
    assert "3.00 GiB too much: give --kv-cache-memory-bytes" in caught.value.message
    safe = int(caught.value.message.split("--kv-cache-memory-bytes ")[1].split(",")[0])
    assert safe == (made.blocks.total_bytes - 3 * GIB) // MIB * MIB


@settings(max_examples=150, deadline=None)
@given(
    total=st.integers(2, 200),
    held=st.floats(0, 1),
    share=st.floats(0.05, 1),
    length=st.integers(1, 131072),
    seqs=st.integers(1, 1024),
    tokens=st.integers(1024, 16384),
)
def test_whatever_is_planned_fits(
    total: int, held: float, share: float, length: int, seqs: int, tokens: int
) -> None:
    """No plan exceeds the share or what is free, and each holds one longest sequence."""
    resolved = resolved_of(
        model={"max_model_len": length},
        cache=CacheOptions(gpu_memory_utilization=share),
        scheduler=SchedulerOptions(max_num_seqs=seqs, max_num_batched_tokens=tokens),
    )
    card = Card("a card", total * GIB, int(total * GIB * (1 - held)))
    try:
        made = planned(resolved, card)
    except ConfigError as error:
        assert "--gpu-memory-utilization" in error.message
        return
    used = made.costs.total + made.blocks.total_bytes
    assert used <= share * card.total_bytes and used <= card.available_bytes
    assert made.blocks.num_blocks[0] * 16 >= length
