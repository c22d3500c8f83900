"""Joining options with the facts of a model: what follows, and which contradictions are told."""

from typing import Any

import msgspec
import pytest
from specs import small_spec

from zlm.api_keys import api_key
from zlm.config import (
    CacheOptions,
    ComputeOptions,
    Config,
    KVGroup,
    ModelOptions,
    ModelSpec,
    ParallelOptions,
    Resolved,
    SchedulerOptions,
    ServerLimits,
    ServerOptions,
    resolve,
)
from zlm.errors import ConfigError
from zlm.sampling_params import SamplingLimits

SPEC = small_spec(
    architecture="gemma3",
    num_layers=4,
    num_heads=2,
    max_position=4096,
    layer_windows=(512, 512, 0, 512),
)

PARTS = ("compute", "cache", "scheduler", "parallel", "server")


def join(*, spec: ModelSpec = SPEC, device: str = "cpu", **options: Any) -> Resolved:
    """Resolve; *options* are whole parts of Config by name, the rest fields of ModelOptions."""
    parts = {name: options.pop(name) for name in PARTS if name in options}
    config = Config(model=ModelOptions(**{"model": "org/m", **options}), **parts)
    return resolve(config, spec, model_path="/m", tokenizer_path="/t", device=device)


def test_what_follows_without_flags() -> None:
    resolved = join()
    assert resolved.served_names == ("org/m",)
    assert (resolved.max_model_len, resolved.max_num_seqs) == (4096, 64)
    assert resolved.max_num_batched_tokens == 256
    assert resolved.kv_groups == (
        KVGroup(layers=(2,), window_tokens=0, num_kv_heads=1, head_dim=8),
        KVGroup(layers=(0, 1, 3), window_tokens=512, num_kv_heads=1, head_dim=8),
    )
    assert (resolved.model_path, resolved.tokenizer_path, resolved.device) == ("/m", "/t", "cpu")


def test_it_crosses_a_process_boundary_unchanged() -> None:
    resolved = join(served_model_name=("a", "b"), server=ServerOptions(api_keys=(api_key("k"),)))
    encoded = msgspec.msgpack.encode(resolved)
    assert msgspec.msgpack.decode(encoded, type=Resolved) == resolved


@pytest.mark.parametrize(
    ("given", "canonical"), [("half", "float16"), ("float", "float32"), ("auto", "auto")]
)
def test_spellings_of_types_are_settled(given: str, canonical: str) -> None:
    assert join(dtype=given, device="cuda").config.model.dtype == canonical


def test_a_gpu_has_larger_steps() -> None:
    resolved = join(device="cuda")
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (256, 8192)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "words"),
    [
        ("bfloat16", "float32", "--kv-cache-dtype float32: on a GPU keys and values are kept in"),
        ("float", "bfloat16", "compute type, float32, or in fp8: give auto, fp8 or float32, or"),
    ],
)
def test_types_that_a_gpu_cannot_have(dtype: str, kv_dtype: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        join(device="cuda", dtype=dtype, cache=CacheOptions(kv_cache_dtype=kv_dtype))
    assert words in caught.value.message


def test_budgets_fit_each_other() -> None:
    small = join(scheduler=SchedulerOptions(max_num_batched_tokens=16))
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (16, 16)
    many = join(scheduler=SchedulerOptions(max_num_seqs=2000))
    assert (many.max_num_batched_tokens, many.max_num_seqs) == (2000, 2000)
    whole = join(scheduler=SchedulerOptions(enable_chunked_prefill=False))
    assert whole.max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"max_model_len": 4097}, "--max-model-len 4097 exceeds the 4096 tokens"),
        ({"max_model_len": 0}, "--max-model-len must be between 1"),
        ({"dtype": "int4"}, "--dtype must be one of"),
        ({"dtype": "half"}, "--dtype half: the CPU computes in float32 or bfloat16"),
        (
            {"cache": CacheOptions(kv_cache_dtype="float16")},
            "--kv-cache-dtype float16: the CPU computes in float32 or bfloat16",
        ),
        ({"quantization": "awq"}, "--quantization awq: this checkpoint is not of that kind"),
        ({"seed": 2**63}, "--seed must be between"),
        (
            {"scheduler": SchedulerOptions(max_num_seqs=32, max_num_batched_tokens=16)},
            "--max-num-batched-tokens 16 is less than --max-num-seqs 32",
        ),
        (
            {
                "scheduler": SchedulerOptions(
                    max_num_batched_tokens=512, enable_chunked_prefill=False
                )
            },
            "--max-num-batched-tokens 512 is less than --max-model-len 4096",
        ),
        ({"cache": CacheOptions(block_size_tokens=0)}, "--block-size must be between 1"),
        ({"cache": CacheOptions(gpu_memory_utilization=1.5)}, "--gpu-memory-utilization must be"),
        (
            {"parallel": ParallelOptions(tensor_parallel_size=0)},
            "--tensor-parallel-size must be between 1 and 64",
        ),
        (
            {"parallel": ParallelOptions(tensor_parallel_size=3, nnodes=2, master_addr="h")},
            "--nnodes 2 does not divide the 3 workers",
        ),
        (
            {"parallel": ParallelOptions(tensor_parallel_size=2, nnodes=2)},
            "--nnodes 2 needs --master-addr",
        ),
        ({"parallel": ParallelOptions(node_rank=1)}, "--node-rank 1 needs --nnodes 2 or more"),
        (
            {"parallel": ParallelOptions(master_addr="10.0.0.1")},
            "--master-addr is for several machines: it needs --nnodes 2 or more",
        ),
        ({"parallel": ParallelOptions(master_port=30000)}, "--master-port is for several"),
        ({"parallel": ParallelOptions(cluster_key_file="key")}, "--cluster-key is for several"),
        ({"parallel": ParallelOptions(headless=True)}, "--headless is for --node-rank 1 and up"),
        ({"server": ServerOptions(ssl_keyfile="k")}, "--ssl-keyfile needs --ssl-certfile"),
        (
            {"server": ServerOptions(ssl_certfile="c", ssl_cert_reqs="required")},
            "--ssl-cert-reqs required needs --ssl-ca-certs",
        ),
        (
            {"server": ServerOptions(limits=ServerLimits(sampling=SamplingLimits(max_n=0)))},
            "--max-n must be between 1 and",
        ),
        ({"served_model_name": ("",)}, "--served-model-name must not be empty"),
    ],
)
def test_contradictions_are_told(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        join(**keywords)
    assert words in caught.value.message


def test_quantization_that_the_checkpoint_has_is_taken() -> None:
    spec = msgspec.structs.replace(SPEC, weights_format="gguf")
    assert join(spec=spec, quantization="gguf").config.model.quantization == "gguf"


@pytest.mark.parametrize(
    ("flag", "method"),
    [
        *(("awq", "awq"), ("awq_marlin", "awq"), ("gptq", "gptq_v2")),
        *(("fp8", "fp8"), ("modelopt", "fp8")),
    ],
)
def test_quantization_may_be_said_in_the_spellings_of_peers(flag: str, method: str) -> None:
    spec = msgspec.structs.replace(SPEC, quantization=method)
    assert join(spec=spec, quantization=flag).spec.quantization == method
    with pytest.raises(ConfigError, match=r"--quantization int4: .* \(its format is "):
        join(spec=spec, quantization="int4")


def test_deterministic_on_a_cpu_is_float32() -> None:
    exact = ComputeOptions(deterministic=True)
    assert join(compute=exact).config.model.dtype == "float32"
    for keywords in ({"dtype": "bfloat16"}, {"cache": CacheOptions(kv_cache_dtype="bfloat16")}):
        with pytest.raises(ConfigError, match="--deterministic: on a CPU bfloat16 products"):
            join(compute=exact, **keywords)


def test_another_quantization_names_those_that_a_gpu_makes() -> None:
    with pytest.raises(ConfigError, match=r"its format is safetensors.; give fp8 or w4a16, or"):
        join(quantization="awq", device="cuda")
