"""What one of several workers has of a model: its spec, and its region of every tensor.

Heads and the inner columns of MLPs and experts are shared out evenly, so that each layer needs the
sum over the ranks twice: of what ``o_proj`` and ``down_proj`` give. Where there are fewer KV heads
than ranks several ranks have the same one. Rows of the vocabulary are shared out too, and columns
of MXFP4 experts by whole blocks, the last ranks' filled up with zeros. All else each rank has
whole; a bias that is added to a sum of all ranks is the first's, and zeros elsewhere.

The stages of a pipeline have layers one after another, which each counts from 0. Imports no torch.
"""

import re
from collections.abc import Sequence

import msgspec

from zlm.config import ModelSpec, Resolved, kv_groups, layer_heads
from zlm.errors import ConfigError
from zlm.weights.region import Range, Region

VOCABULARY = ("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight")
VOCABULARY_ROWS = 16  # a rank's rows of the vocabulary are a multiple of this
MXFP4_BLOCK = 32  # columns of experts that share a scale: they are not parted
FLAG, STAGES_FLAG = "--tensor-parallel-size", "--pipeline-parallel-size"

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FUSED = (".gate_up_proj", ".gate_up_proj_bias", ".down_proj", ".down_proj_bias")
_BERT_ROWS = ("query", "key", "value", "intermediate.dense")  # BERT's names of products, by what
_BERT_COLUMNS = ("output.dense",)  # is shared out of them


def check(spec: ModelSpec, ranks: int) -> None:
    """Raise ConfigError, naming the flag, if the model cannot be shared out to *ranks*."""
    if ranks == 1:
        return
    sizes = {"attention heads": spec.num_heads}
    experts = spec.experts
    if experts is None or not all(experts.layers or (True,)):
        sizes["columns of its MLPs"] = spec.intermediate_size
    if experts is not None:
        if spec.quantization != "mxfp4":
            sizes["columns of its experts"] = experts.size
        if experts.shared_size:
            sizes["columns of its shared expert"] = experts.shared_size
    for what, count in sizes.items():
        if count % ranks:
            raise ConfigError(f"{FLAG} {ranks} does not divide the model's {count} {what}")
    for index in range(spec.num_layers):
        kv_heads, _ = layer_heads(spec, index)
        if kv_heads % ranks and ranks % kv_heads:
            raise ConfigError(
                f"{FLAG} {ranks} neither divides the model's {kv_heads} KV heads nor is a multiple "
                "of them"
            )


def spec_of_rank(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Return *spec* with the heads and inner sizes that each of *ranks* ranks has."""
    check(spec, ranks)
    if ranks == 1:
        return spec
    experts, gemma4 = spec.experts, spec.gemma4
    if experts is not None:
        experts = msgspec.structs.replace(
            experts, size=expert_columns(spec, ranks), shared_size=experts.shared_size // ranks
        )
    if gemma4 is not None:
        heads = max(1, gemma4.full_kv_heads // ranks)
        gemma4 = msgspec.structs.replace(gemma4, full_kv_heads=heads)
    return msgspec.structs.replace(
        spec,
        num_heads=spec.num_heads // ranks,
        num_kv_heads=max(1, spec.num_kv_heads // ranks),
        intermediate_size=spec.intermediate_size // ranks,
        experts=experts,
        gemma4=gemma4,
    )


def check_stages(spec: ModelSpec, stages: int) -> None:
    """Raise ConfigError, naming the flag, if layers cannot be shared out to *stages* stages."""
    if stages == 1:
        return
    what = f"{STAGES_FLAG} {stages}"
    if stages > spec.num_layers:
        raise ConfigError(f"{what}: the model has {spec.num_layers} layers")
    if spec.gemma4 is not None or spec.bidirectional or spec.pooling is not None:
        raise ConfigError(f"{what}: this model's layers must all be in one process, give 1")
    windows = spec.layer_windows or (0,)
    for stage in range(stages):
        of_stage = spec_of_stage(spec, *layers_of_stage(spec, stage, stages))
        if set(of_stage.layer_windows or (0,)) != set(windows):
            raise ConfigError(
                f"{what}: each stage needs layers of every kind, full and sliding, and stage "
                f"{stage} would have layers of one kind only"
            )


def layers_of_stage(spec: ModelSpec, stage: int, stages: int) -> Range:
    """Return the first layer of *stage* and the one after its last."""
    return stage * spec.num_layers // stages, (stage + 1) * spec.num_layers // stages


def spec_of_stage(spec: ModelSpec, first: int, last: int) -> ModelSpec:
    """Return *spec* with layers *first* to *last* - 1 alone, counted from 0."""
    if (first, last) == (0, spec.num_layers):
        return spec
    experts = spec.experts
    if experts is not None:
        experts = msgspec.structs.replace(experts, layers=experts.layers[first:last])
    return msgspec.structs.replace(
        spec,
        num_layers=last - first,
        layer_windows=spec.layer_windows[first:last],
        rope_layers=spec.rope_layers[first:last],
        experts=experts,
    )


def moved_layer(name: str, by: int) -> str:
    """Return *name* with the number of its layer, if it is a layer's, raised by *by*."""
    return _LAYER.sub(lambda found: f".layers.{int(found[1]) + by}.", name) if by else name


def resolved_of_worker(resolved: Resolved, worker: int = 0) -> Resolved:
    """Return *resolved* with what each worker has: for plans of memory, caches and steps."""
    parallel = resolved.config.parallel
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    layers = layers_of_stage(resolved.spec, worker // ranks, stages)
    spec = spec_of_stage(spec_of_rank(resolved.spec, ranks), *layers)
    return msgspec.structs.replace(resolved, spec=spec, kv_groups=kv_groups(spec))


def largest_stage(spec: ModelSpec, stages: int) -> int:
    """Return the stage that needs the most memory: of those with most layers, and with most full
    attention among them, the last.
    """

    def size(stage: int) -> tuple[int, int]:
        own = spec_of_stage(spec, *layers_of_stage(spec, stage, stages))
        return own.num_layers, own.layer_windows.count(0)

    return max(reversed(range(stages)), key=size)


def vocabulary_rows(vocab_size: int, ranks: int) -> int:
    """Return the rows of the vocabulary that each rank has, padding included."""
    each = -(-vocab_size // ranks)
    return each + -each % VOCABULARY_ROWS


def expert_columns(spec: ModelSpec, ranks: int) -> int:
    """Return the inner columns that each rank has of an expert, padding included."""
    assert spec.experts is not None, "no experts"
    block = MXFP4_BLOCK if spec.quantization == "mxfp4" else 1
    return -(-spec.experts.size // (block * ranks)) * block


def region(
    spec: ModelSpec, name: str, shape: Sequence[int], rank: int, ranks: int
) -> Region | None:
    """Return what *rank* has of tensor *name*, which has *shape*; None: all of it.

    *spec* is the whole model's.
    """
    if ranks == 1:
        return None
    if name.endswith(VOCABULARY):
        return _padded(0, shape[0], vocabulary_rows(shape[0], ranks), rank)
    if name.endswith(_FUSED):
        return _fused_expert(spec, name, shape, rank, ranks)
    module, kind = ("." + name).rsplit(".", 2)[-2:]
    if name.startswith("encoder."):
        return _bert(name.removesuffix(f".{kind}"), kind, shape, rank, ranks)
    match module:
        case "q_proj" | "k_proj" | "v_proj" | "qkv_proj" | "q_norm" | "k_norm" | "self_attn":
            return _heads(spec, name, shape, rank, ranks)
        case "gate_proj" | "up_proj":
            dim = len(shape) - (2 if kind == "weight" else 1)
            return Region(dim, (_even(shape[dim], rank, ranks),))
        case "gate_up_proj" | "Wi":
            return _of_halves(shape, 0, rank, ranks)
        case "o_proj" | "down_proj" | "Wo" if kind == "bias":
            return _first_rank_alone(shape, rank)
        case "o_proj" | "down_proj" | "Wo":
            dim = len(shape) - 1
            return Region(dim, (_even(shape[dim], rank, ranks),))
    return None


def _bert(module: str, kind: str, shape: Sequence[int], rank: int, ranks: int) -> Region | None:
    """Return the region of a tensor of BERT's encoder."""
    if module.endswith(_BERT_ROWS):
        return Region(0, (_even(shape[0], rank, ranks),))
    if module.endswith("relative_attention_bias"):  # a column a head
        return Region(1, (_even(shape[1], rank, ranks),))
    if not module.endswith(_BERT_COLUMNS):
        return None
    if kind == "bias":
        return _first_rank_alone(shape, rank)
    return Region(1, (_even(shape[1], rank, ranks),))


def _heads(
    spec: ModelSpec, name: str, shape: Sequence[int], rank: int, ranks: int
) -> Region | None:
    """Return the region of what has rows for each head."""
    found = _LAYER.search("." + name)
    assert found is not None, "heads are a layer's"
    kv_heads, head_dim = layer_heads(spec, int(found[1]))
    if name.endswith("sinks"):
        return Region(0, (_even(shape[0], rank, ranks),))
    if name.endswith("_scale"):  # of keys or values in the cache: one for all heads, or for each
        own = _kv_heads(kv_heads, rank, ranks)
        return Region(0, (own,)) if tuple(shape) == (kv_heads,) and kv_heads > 1 else None
    if "_norm." in name and not spec.qk_norm_whole:
        return None
    if name.endswith("_scale") and tuple(shape) == (1,):
        return None
    if name.endswith("_scale"):  # of the cache, one for each KV head
        head_dim = 1
    q_range = _even(spec.num_heads * head_dim, rank, ranks)
    first, last = _kv_heads(kv_heads, rank, ranks)
    kv_range = first * head_dim, last * head_dim
    if ".qkv_proj." in name:
        keys = spec.num_heads * head_dim
        starts = (keys, keys + kv_heads * head_dim)
        return Region(0, (q_range, *(_moved(kv_range, start) for start in starts)))
    return Region(0, (q_range if ".q_" in name else kv_range,))


def _fused_expert(
    spec: ModelSpec, name: str, shape: Sequence[int], rank: int, ranks: int
) -> Region | None:
    """Return the region of a tensor of all experts whose gate and up are one."""
    if name.endswith("down_proj_bias"):
        return _first_rank_alone(shape, rank)
    dim, experts = 1 if name.endswith("down_proj") else len(shape) - 1, spec.experts
    assert experts is not None, "an expert's name"
    if dim == 2 and experts.layout == "halves":
        return _of_halves(shape, dim, rank, ranks)
    each = expert_columns(spec, ranks) * (shape[dim] // experts.size)  # of gate and up by turns
    return _padded(dim, shape[dim], each, rank)


def _of_halves(shape: Sequence[int], dim: int, rank: int, ranks: int) -> Region:
    """Return the region of a tensor that has gate and then up along *dim*."""
    half = shape[dim] // 2
    first, last = _even(half, rank, ranks)
    return Region(dim, ((first, last), (half + first, half + last)))


def _padded(dim: int, count: int, each: int, rank: int) -> Region:
    """Return the region of *each* entries of *rank*, zeros from *count* on."""
    first, last = min(rank * each, count), min((rank + 1) * each, count)
    return Region(dim, ((first, last),), each - (last - first))


def _first_rank_alone(shape: Sequence[int], rank: int) -> Region | None:
    return None if rank == 0 else Region(0, (), shape[0])


def _kv_heads(kv_heads: int, rank: int, ranks: int) -> Range:
    """Return the KV heads of *rank*; of fewer than ranks, several have the same one."""
    first = rank * kv_heads // ranks
    return first, max(first + 1, (rank + 1) * kv_heads // ranks)


def _even(count: int, rank: int, ranks: int) -> Range:
    each = count // ranks
    return rank * each, (rank + 1) * each


def _moved(bounds: Range, by: int) -> Range:
    return bounds[0] + by, bounds[1] + by
