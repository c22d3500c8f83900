"""What a server takes of a GPU beside the KV cache: formulas over shapes, no tensor and no device.

    context       the driver's own: held when memory was first looked at
    weights       exact: the model's tensors, rotary tables among them
    tables        of slots (tokens, block tables), counts of penalties, sampling scratch
    activations   of the largest step, see below
    graphs        of CUDA: their pool (a captured step's activations once more) and their nodes
    reserve       cuBLAS workspaces, compiled kernels, rounding of the allocator

Activations, with e bytes an element, T tokens and S samples a step. A layer's tensors, as if none
were ever put where one of another size was (the allocator does not move what it holds):

    e * T * (6 * hidden + (heads + 2 * KV heads) * D  +  heads * D  +  3 * intermediate)
            residual, norms, products   qkv                attention     gate | up, their product

where the residual counts twice, as it is float32 if the compute type is float16, and of a mixture
with k experts of size i for a token the last term is  k * (hidden + i).  Then the logits,
S * vocab * (e + 12): of the product, in float32, adjusted, and one more for log-probabilities.
Prompts' log-probabilities come in pieces of a fixed size, after the layers and in their memory.
torch's attention (sdpa) gathers the longest context of a row for all its heads, and has a mask; of
a cache of e4m3 one layer's keys and values are widened to 16 bits.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from zlm.config import ModelSpec, Resolved, layer_heads
from zlm.config_types import kv_cache_type, online_quantization
from zlm.models import shares
from zlm.models.tensors import expected_tensors

MIB = 2**20
MOST_CONTEXT_BYTES = 640 * MIB  # what a process without tensors holds: 0.3 to 0.6 GiB by card
PROMPT_LOGITS_BYTES = 4 * 64 * MIB  # pieces of 64 MiB of logits, in at most four forms
# Of a kernel in a captured graph: 20 graphs of 213 and of 313 took 14 and 18 MiB on an H200.
GRAPH_NODE_BYTES = 4 * 1024
NODES_A_LAYER, NODES_BESIDE = 10, 48  # kernels of a captured step
NODES_OF_MIXTURE, NODES_OF_GEMMA4 = 12, 10  # more of them in a layer
TOP_LOGPROBS = 32  # alternatives that the scratch of log-probabilities holds
SCRATCH_CHUNK = 4096  # ids of a chunk of the vocabulary, and a sampling row's bytes for each:
SCRATCH_CHUNK_BYTES = 16 + 2 * 16 * 8 + 12 + 8 * TOP_LOGPROBS
SAMPLER_COLUMN_BYTES = 256  # a slot's parameters
STEP_TOKEN_BYTES = 128  # ids, positions, slots of each group: integers of a step's tokens and rows
DECODE_PROGRAMS = 8  # of decode attention on a multiprocessor; each may leave two pieces
SDPA_QUERIES = 256  # of a call of torch's attention: rows of its mask
SPREAD_VALUES = 1 << 26  # of a quantized weight in the compute type: ``gpu_quantized``'s pieces
PRODUCTS = "_proj", "_proj.weight"  # how the names of what may be codes end
# Of a weight, scales included: of what is quantized as it is read, and of MXFP4.
ONLINE_BYTES, MXFP4_BYTES = {"fp8": 1.0, "w4a16": 0.53}, 0.5 + 2 / 32
BOTH_SHARE = 5  # codes and their form in the compute type may take one part in so many of a card
# Keys and values are widened for contexts of so many steps in all, in so small a part of a card.
WIDENED_STEPS, WIDENED_SHARE = 8, 512
SPAN = 32  # columns that kernels of 4 bits read at once; those of 8 bits read 16
SMALL_BYTES = 2**30  # of a GGUF file's weights in the compute type, up to which they are spread out
MATRIX_UNITS = (8, 0)  # compute capability below which attention is torch's


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU before this process put a tensor on it. Bytes; the driver's context is already held."""

    name: str
    total_bytes: int
    free_bytes: int
    processors: int = 132
    holders: str = ""  # who else holds memory, in words; empty: not known
    capability: tuple[int, int] = (9, 0)

    @property
    def context_bytes(self) -> int:
        """What is taken to be this process's own of the memory that is held."""
        return min(self.total_bytes - self.free_bytes, MOST_CONTEXT_BYTES)

    @property
    def available_bytes(self) -> int:
        """All that this process can have, what it has included."""
        return self.free_bytes + self.context_bytes


@dataclass(frozen=True, slots=True)
class Capacities:
    """What no step exceeds, and what graphs there are."""

    tokens: int  # of a step, padding included
    samples: int  # rows of a step that sample
    slots: int  # running sequences, and what padding has
    graph_tokens: int = 0  # of the largest captured step; 0: there are no graphs
    num_graphs: int = 0
    rows: int = 0  # of a step, padding included


@dataclass(frozen=True, slots=True)
class Costs:
    """What the server takes beside the KV cache, in bytes. The order is the table's."""

    context: int
    weights: int
    tables: int
    activations: int
    graphs: int
    reserve: int

    @property
    def total(self) -> int:
        return self.context + self.allocated

    @property
    def allocated(self) -> int:
        """What torch allocates, or may."""
        return self.weights + self.tables + self.activations + self.graphs + self.reserve


def weight_bytes(spec: ModelSpec, element_bytes: int, max_model_len: int, ranks: int = 1) -> int:
    """Return what the model of *spec* takes, from its shapes: tensors and rotary tables.

    ranks: of which *spec* is one's, except that all of the vocabulary is in it.
    """
    values = 0
    for name, shape in expected_tensors(spec).items():
        is_shared = ranks > 1 and name.endswith(shares.VOCABULARY)
        rows = shares.vocabulary_rows(shape[0], ranks) if is_shared else shape[0]
        values += rows * math.prod(shape[1:])
    num_tables = 1 + (spec.rope_sliding is not None) + bool(spec.rope_layers)
    return values * element_bytes + num_tables * max_model_len * widest_head(spec) // 2 * 8


def stored_bytes(resolved: Resolved, element_bytes: int) -> int:
    """Return what weights of a quantized model take on one of the workers, as far as can be told.

    MXFP4, and what is quantized as it is read, are counted by shapes; of other checkpoints a worker
    has its part of the files, or as much as without quantization if there are none. What kernels
    cannot read as it is takes more. Not known is whether GPTQ's columns are out of order: those of
    a product that several ranks share are then in the compute type.
    """
    spec, config = resolved.spec, resolved.config
    ranks = config.parallel.tensor_parallel_size
    plain = weight_bytes(spec, element_bytes, resolved.max_model_len, ranks)
    online = online_quantization(config, spec)
    is_dummy = config.model.load_format == "dummy" and online is None
    if is_dummy or not keeps_codes(resolved, element_bytes):
        return plain
    dims = 3 if spec.quantization == "mxfp4" else 2
    products = _products(spec, dims)
    narrow = MXFP4_BYTES if online is None else ONLINE_BYTES[online]
    if online is None and dims == 2:
        path, values = Path(resolved.model_path), sum(map(math.prod, products.values()))
        files = path.glob("*.safetensors") if path.is_dir() else [path] if path.is_file() else []
        stored = sum(file.stat().st_size for file in files) // config.parallel.num_workers
        others = plain - values * element_bytes
        narrow = min(max(stored - others, 0) / values, element_bytes) if stored else element_bytes
    saved = 0.0
    for name, shape in products.items():
        columns = shape[-1]
        if spec.experts is not None and ".experts." in name:  # all are kept alike
            columns = math.gcd(columns, spec.experts.size)
        rest = columns % SPAN  # see ``zlm.ops.gpu_packing``
        each = element_bytes if rest % 16 else max(narrow, 1) if rest else narrow
        saved += math.prod(shape) * (element_bytes - each)
    return plain - int(saved)


def _products(spec: ModelSpec, dims: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes, of *dims* dimensions, of what may be codes."""
    tensors = expected_tensors(spec).items()
    return {n: shape for n, shape in tensors if n.endswith(PRODUCTS) and len(shape) == dims}


def keeps_codes(resolved: Resolved, element_bytes: int) -> bool:
    """Tell whether products of the model are made of codes: not in float32, unless asked for.

    Nor are those of a small GGUF file, whose products wait for launches and not for memory: in
    bfloat16 SmolLM2 of 135M has 1.1, 1.8, 2.1 and 1.1 times the tokens at 1, 8, 64 and 256 streams
    (bench/RESULTS.md). ``--quantization gguf`` asks for them.
    """
    config, spec = resolved.config, resolved.spec
    if online_quantization(config, spec) is not None:
        return True
    if spec.weights_format == "gguf":
        is_wanted = config.model.quantization is not None
        is_kept = is_wanted or weight_bytes(spec, element_bytes, 0) > SMALL_BYTES
    else:
        is_kept = spec.quantization is not None
    return element_bytes <= 2 and is_kept


def spread_bytes(resolved: Resolved, element_bytes: int, card: Card) -> int:
    """Return what products take in the compute type beside their codes; 0: only codes are kept.

    They are kept in both forms where that is a small part of the card: many rows are faster so.
    Codes of float8 may turn out not to need it; experts are codes alone.
    """
    spec, config = resolved.spec, resolved.config
    online = online_quantization(config, spec)
    if element_bytes > 2 or not keeps_codes(resolved, element_bytes):
        return 0
    if config.compute.deterministic or online == "fp8" or spec.quantization == "mxfp4":
        return 0
    products = _products(spec, 2).items()
    values = sum(math.prod(shape) for name, shape in products if ".experts." not in name)
    if spec.weights_format == "gguf":
        values += spec.vocab_size * spec.hidden_size
    both = stored_bytes(resolved, element_bytes) + values * element_bytes
    return values * element_bytes if both * BOTH_SHARE <= card.total_bytes else 0


def quantized_step_bytes(resolved: Resolved, element_bytes: int, tokens: int) -> int:
    """Return what products of codes take of a step beside what others do: see
    ``zlm.ops.gpu_quantized``."""
    if not keeps_codes(resolved, element_bytes):
        return 0
    spec = resolved.spec
    rounded = tokens * (element_bytes * spec.hidden_size + spec.intermediate_size)
    return SPREAD_VALUES * element_bytes + rounded


def widest_head(spec: ModelSpec) -> int:
    """Return the elements of a head in the layers where it has most."""
    return max(layer_heads(spec, i)[1] for i in range(spec.num_layers))


def activation_bytes(spec: ModelSpec, element_bytes: int, tokens: int, samples: int) -> int:
    """Return what a step of *tokens* tokens with *samples* samples takes (module docstring)."""
    head_dim, inner = widest_head(spec), 3 * spec.intermediate_size
    heads = spec.num_heads * head_dim
    if spec.experts is not None:
        of_pair = spec.hidden_size + spec.experts.size
        inner = max(inner, spec.experts.chosen * of_pair + 3 * spec.experts.shared_size)
    qkv = heads + 2 * spec.num_kv_heads * head_dim
    if spec.gemma4 is not None:
        inner = 2 * inner + 2 * spec.num_layers * spec.gemma4.per_layer_size
    residual = 2 * spec.hidden_size * max(4 - element_bytes, 0)  # where it is float32
    of_token = element_bytes * (6 * spec.hidden_size + qkv + heads + inner) + residual
    logits = samples * spec.vocab_size * (element_bytes + 12)
    return tokens * (of_token + STEP_TOKEN_BYTES) + logits


def table_bytes(resolved: Resolved, capacities: Capacities) -> int:
    """Return what slot tables and the sampler's tables and scratch take."""
    slots = capacities.slots
    width = -(-(resolved.max_model_len + 1) // resolved.config.cache.block_size_tokens)
    tokens = slots * (resolved.max_model_len + 1) * 4
    rows = slots + 2 * capacities.rows  # of a step, too: gathered, and gathered in a graph
    blocks = len(resolved.kv_groups) * rows * width * 4
    return tokens + blocks + sampler_bytes(resolved.spec.vocab_size, slots, capacities.samples)


def sampler_bytes(vocab_size: int, slots: int, samples: int) -> int:
    """Return the most that a sampler keeps: counts, masks and scratch, once a request asks."""
    counts = slots * vocab_size * 4
    masks = slots * (-(-vocab_size // 32)) * 4
    chunks = -(-vocab_size // SCRATCH_CHUNK)
    return counts + masks + samples * chunks * SCRATCH_CHUNK_BYTES + SAMPLER_COLUMN_BYTES * slots


def attention_bytes(
    resolved: Resolved, element_bytes: int, capacities: Capacities, card: Card
) -> int:
    """Return what attention keeps beside its result."""
    spec = resolved.spec
    group = -(-spec.num_heads // spec.num_kv_heads)
    pieces = 2 * DECODE_PROGRAMS * card.processors * group
    needed = pieces * (widest_head(spec) + 1) * 4
    if _is_gathered(resolved, card):
        needed += resolved.max_model_len * gathered_bytes(spec, element_bytes)
    return needed + widened_bytes(resolved, element_bytes, card)


def _is_gathered(resolved: Resolved, card: Card) -> bool:
    """Tell whether attention is torch's."""
    wanted = resolved.config.compute.attention_backend
    return wanted == "sdpa" or (wanted == "auto" and card.capability < MATRIX_UNITS)


def widened_bytes(resolved: Resolved, element_bytes: int, card: Card) -> int:
    """Return what keys and values of e4m3 take that prompts read in 16 bits: of one layer."""
    spec, config = resolved.spec, resolved.config
    kept = kv_cache_type(config.cache.kv_cache_dtype, "", spec, resolved.device)
    if kept != "fp8_e4m3" or element_bytes > 2 or config.compute.deterministic:
        return 0
    if _is_gathered(resolved, card):
        return 0
    step = resolved.max_num_batched_tokens
    tokens = min(resolved.max_model_len + step, WIDENED_STEPS * step)
    of_token = 2 * 2 * max(math.prod(layer_heads(spec, i)) for i in range(spec.num_layers))
    return min(tokens * of_token, card.total_bytes // WIDENED_SHARE)


def gathered_bytes(spec: ModelSpec, element_bytes: int) -> int:
    """Return what sdpa attention takes for each token of a row's context."""
    heads = 2 * spec.num_heads * widest_head(spec)  # keys and values of all query heads
    kv_heads = 2 * spec.num_kv_heads * widest_head(spec)
    needed = element_bytes * (heads + 2 * kv_heads) + SDPA_QUERIES * (16 + element_bytes)
    if spec.attention_softcap:  # products of its own, in float32
        needed += 4 * (heads + 2 * spec.num_heads * SDPA_QUERIES)
    return needed


def graph_bytes(resolved: Resolved, element_bytes: int, capacities: Capacities) -> int:
    """Return what captured graphs take: one pool for all of them, and each one's nodes."""
    if not capacities.num_graphs:
        return 0
    spec, tokens = resolved.spec, capacities.graph_tokens
    pool = activation_bytes(spec, element_bytes, tokens, min(capacities.samples, tokens))
    pool += quantized_step_bytes(resolved, element_bytes, tokens)
    more = NODES_OF_MIXTURE if spec.experts is not None else 0
    more += NODES_OF_GEMMA4 if spec.gemma4 is not None else 0
    nodes = spec.num_layers * (NODES_A_LAYER + more) + NODES_BESIDE
    return pool + capacities.num_graphs * nodes * GRAPH_NODE_BYTES


def costs(
    resolved: Resolved,
    card: Card,
    capacities: Capacities,
    *,
    element_bytes: int,
    weights: int | None = None,
) -> Costs:
    """Return what all but the KV cache takes; *weights* is what the loaded model was seen to take.

    Without *weights* they are counted from the spec: to know before they are read that they fit.
    """
    spec = resolved.spec
    if weights is None:
        weights = stored_bytes(resolved, element_bytes)
        weights += spread_bytes(resolved, element_bytes, card)
    step = activation_bytes(spec, element_bytes, capacities.tokens, capacities.samples)
    step += quantized_step_bytes(resolved, element_bytes, capacities.tokens)
    attention = attention_bytes(resolved, element_bytes, capacities, card)
    return Costs(
        context=card.context_bytes,
        weights=weights,
        tables=table_bytes(resolved, capacities),
        activations=max(step, PROMPT_LOGITS_BYTES) + attention,
        graphs=graph_bytes(resolved, element_bytes, capacities),
        reserve=min(512 * MIB, card.total_bytes // 32),
    )
