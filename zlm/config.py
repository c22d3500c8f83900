"""Configuration: frozen structs per concern, the facts of a model, and what both resolve to.

Imports nothing of zlm but the error tree and its own parts (``config_server`` and the like). The
command line (or ``LLM``) builds a ``Config`` once; ``resolve`` joins it with the ``ModelSpec`` read
from the checkpoint into a ``Resolved``, which the supervisor sends to every process and nobody
changes.
"""

from typing import Any, Literal

import msgspec

from zlm.api_keys import ApiKey as ApiKey
from zlm.config_parallel import ParallelOptions as ParallelOptions, check_parallel
from zlm.config_server import (
    LogOptions as LogOptions,
    ServerLimits as ServerLimits,
    ServerOptions as ServerOptions,
    among,
    check_server,
    within,
)
from zlm.config_types import (
    DTYPE_SPELLINGS as DTYPE_SPELLINGS,
    DTYPES as DTYPES,
    KV_CACHE_DTYPES as KV_CACHE_DTYPES,
    check_form,
    check_kv_dtype as check_kv_dtype,
    kv_cache_type as kv_cache_type,
)
from zlm.errors import ConfigError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
ATTENTION_BACKENDS = ("auto", "triton", "sdpa")
TOOL_CALL_PARSERS = (
    "cohere", "deepseek_v3", "deepseek_v31", "deepseek_v32", "ernie45", "functiongemma",
    "functools", "gemma4", "glm45", "glm47", "granite", "harmony", "hermes", "hunyuan_a13b",
    "internlm", "jamba", "json", "kimi_k2", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic",
    "minimax", "minimax_m2", "mistral", "nemotron", "olmo3", "openai", "phi4_mini_json", "pythonic",
    "qwen3_coder", "qwen3_xml", "seed_oss", "xlam",
)  # fmt: skip
REASONING_PARSERS = (
    "apriel", "cohere", "deepseek_r1", "deepseek_v3", "ernie45", "gemma4", "glm45", "granite",
    "harmony", "kimi_k2", "minimax_m2", "mistral", "none", "olmo3", "openai_gptoss", "qwen3",
    "seed_oss", "think",
)  # fmt: skip
TASKS = ("auto", "generate", "embedding", "embed", "classify", "score")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")
MAX_TOKENS = 2**31 - 1
AUTO_LENGTHS = ("auto", -1)  # of --max-model-len; -1 is vLLM's


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, in what form."""

    model: str  # a folder, a GGUF file, or a Hugging Face id
    tokenizer: str | None = None  # a folder or id to take the tokenizer from; None: the model's
    revision: str | None = None  # branch, tag or commit of a Hugging Face id
    download_dir: str | None = None  # where downloads are kept; None: the Hugging Face cache
    dtype: str = "auto"  # auto, float32, bfloat16, float16 (half and float are spellings)
    # Context length in tokens. None: what the model was made for; auto, or -1: what of it fits.
    max_model_len: int | Literal["auto"] | None = None
    served_model_name: tuple[str, ...] = ()  # names clients may ask for; empty: the model's
    load_format: str = "auto"  # auto, safetensors, gguf, dummy (random weights)
    generation_config: str = "auto"  # auto: from the checkpoint; none: ignore it; or a folder
    chat_template: str | None = None  # a file or the template itself; None: the checkpoint's
    seed: int | None = None  # seeds requests that bring none (None: fresh randomness)
    quantization: str | None = None  # checked against the checkpoint; None: what it says
    skip_tokenizer_init: bool = False  # no tokenizer: prompts and answers are token ids
    task: str = "auto"  # one of TASKS: what the model is served for
    runner: str = "auto"  # one of RUNNERS: text, or vectors and scores
    convert: str = "auto"  # one of CONVERSIONS: what a model of text is made into


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size_tokens: int = 16  # tokens in a KV block
    gpu_memory_utilization: float = 0.90  # fraction of device memory that zlm may use
    kv_cache_dtype: str = "auto"  # one of KV_CACHE_DTYPES; auto: see ``kv_cache_type``
    kv_cache_memory_bytes: int | None = None  # size of the KV cache; None: planned
    num_blocks_override: int | None = None  # blocks a KV group gets, whatever the plan says
    enable_prefix_caching: bool = True  # reuse blocks of equal prefixes


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How steps are formed."""

    max_num_seqs: int | None = None  # most running sequences; None: by device
    max_num_batched_tokens: int | None = None  # token budget of a step; None: by device
    enable_chunked_prefill: bool = True  # split prompts longer than the step's budget
    policy: Literal["fcfs", "priority"] = "fcfs"  # order of waiting requests
    run_ahead_steps: int = 2  # steps planned before the first of them has ended
    max_waiting_seqs: int | None = None  # sequences that may wait for room; None: no limit


class ComputeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a GPU computes; a CPU is eager, and deterministic where it computes in float32."""

    enforce_eager: bool = False  # no CUDA graphs: every step launches its kernels one by one
    deterministic: bool = False  # results of a sequence depend on nothing but the sequence
    attention_backend: Literal["auto", "triton", "sdpa"] = "auto"  # auto: what suits the card


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a user can set."""

    model: ModelOptions
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    parallel: ParallelOptions = ParallelOptions()
    compute: ComputeOptions = ComputeOptions()
    server: ServerOptions = ServerOptions()
    log: LogOptions = LogOptions()


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of one kind of layer.

    ``scaling`` is none, linear, llama3, yarn, longrope, or temperature, which turns nothing and
    makes q larger from position to position; the fields after it belong to the kinds named in their
    comments (Hugging Face's names, checked by the rotary layer).
    """

    theta: float = 10000.0
    partial_factor: float = 1.0  # fraction of head_dim that is rotated
    neighbours: bool = False  # the checkpoint has the two of a pair side by side (Llama 4)
    scaling: str = "none"
    factor: float = 1.0  # linear, llama3, yarn, longrope, temperature
    original_max_position: int = 0  # llama3, yarn, longrope, temperature
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults a checkpoint ships in generation_config.json; None: it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One dense layer on top of a pooled vector: activation(x @ W.T + b)."""

    name: str  # of its tensors: name.weight [out, in] and name.bias [out]
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "identity"  # identity, tanh, relu or gelu
    path: str = ""  # folder of its weights within the checkpoint; empty: the model's own files
    norm: str = ""  # of the weight (and ``norm_bias``: the bias) of a LayerNorm after it
    norm_bias: bool = False
    norm_eps: float = 0.0


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How hidden states become one vector a sequence, or scores of labels."""

    # The vector of the first token (cls) or the last; of all: mean, sqrt (their sum, divided by the
    # root of their number), weightedmean (later ones weigh more) or max; tokens: one for each.
    kind: str = "last"
    normalize: bool = True  # to length 1, at the end
    dense: tuple[DenseSpec, ...] = ()
    num_labels: int = 0  # over 0: the last dense layer gives so many logits, and not a vector
    labels: tuple[str, ...] = ()  # their names
    activation: str = "sigmoid"  # of logits: sigmoid, softmax or identity
    max_tokens: int = 0  # longest text the vectors were made for; 0: the context length
    prompts: dict[str, str] = {}  # texts that may precede an input, by name
    default_prompt: str = ""  # the name of the one that precedes inputs that name none
    dimensions: tuple[int, ...] = ()  # lengths to which a vector may be cut
    least_dimensions: int = 0  # over 0: any length from here on may be asked for, too


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in the MLP's place: a router chooses some of them for each token."""

    count: int
    chosen: int  # experts of a token
    size: int  # intermediate size of one
    layers: tuple[bool, ...] = ()  # which layers are mixtures; empty: all
    normalize: bool = True  # the chosen experts' shares of a token are made to sum to 1
    shared_size: int = 0  # intermediate size of the expert that all tokens have; 0: none
    shared_gate: bool = True  # a token takes a share of that, and not all
    # A token's shares are sigmoids of its logits, and multiply what its experts read (Llama 4).
    sigmoid: bool = False
    # How the checkpoint keeps them: each expert's tensors, those of a layer stacked (GGUF), or
    # fused: stacked and transposed, with gate and up row by row in one (gpt-oss); halves: the same
    # with all of gate before up (Llama 4).
    layout: Literal["each", "stacked", "fused", "halves"] = "each"
    biases: bool = False  # of the router and the experts
    limit: float = 0.0  # over 0: gate and up are clamped (gpt-oss)
    alpha: float = 0.0  # of the clamped activation


class Gemma4Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What Gemma 4 has beside other Gemmas. Layers without a window are of another geometry."""

    full_head_dim: int
    full_kv_heads: int
    keys_are_values: bool = False  # full layers have no values of their own
    shared_layers: int = 0  # last ones, which use keys and values of layers before them
    wide_shared_mlp: bool = False  # whose MLP is twice as wide
    per_layer_size: int = 0  # elements of each layer's own embedding of a token; 0: there is none


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a checkpoint that decide how it is computed. Built by ``zlm.models.config``."""

    architecture: str  # our name of the family; ``zlm.models.registry`` has them all
    vocab_size: int  # rows of the embedding: the bound of token ids
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # context length the checkpoint was made for, in tokens
    rms_norm_eps: float
    activation: str = "silu"  # silu, gelu_tanh, gelu or relu (the last two: bert only)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_plain: bool = False  # q and k are normed without a weight where they turn (Llama 4)
    norm_bias: bool = True  # LayerNorms have biases (encoders)
    norm_plus_one: bool = False  # RMSNorm multiplies by 1 + weight (Gemma, Hugging Face form)
    sandwich_norms: bool = False  # norms after attention and MLP too (Gemma)
    attention_sinks: bool = False  # each head has a score that takes its share of the softmax
    post_norms: bool = False  # norms after attention and MLP, none before (OLMo 2)
    qk_norm_whole: bool = False  # the norms of q and k go over all heads together (OLMo 2)
    fused_products: bool = False  # q, k, v are one tensor, and gate and up another (Phi-3)
    embedding_scale: float = 1.0  # embeddings are multiplied by this, rounded to their type
    attention_scale: float = 0.0  # of q·k before the softmax; 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # 0: none
    final_softcap: float = 0.0  # of the logits; 0: none
    layer_windows: tuple[int, ...] = ()  # of each layer, in tokens; 0: full; see ``first_seen``
    rope: RopeSpec = RopeSpec()  # of full layers
    rope_sliding: RopeSpec | None = None  # of sliding layers, where it differs (Gemma 3)
    rope_layers: tuple[bool, ...] = ()  # which layers turn q and k at all; empty: all (SmolLM3)
    rope_still: RopeSpec | None = None  # of those that do not, if they do something else (Llama 4)
    experts: ExpertsSpec | None = None
    gemma4: Gemma4Spec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # config, generation_config and tokenizer together
    checkpoint_dtype: str = "float32"  # torch's name; bfloat16 for quantized GGUF files
    weights_format: str = "safetensors"  # safetensors or gguf
    quantization: str | None = None  # method of a quantized safetensors checkpoint
    static_inputs: bool = False  # its activations are rounded by scales that it has
    kv_cache_dtype: str = ""  # fp8_e4m3: keys and values have scales for it; empty: they have none
    generation: GenerationDefaults = GenerationDefaults()
    pooling: PoolingSpec | None = None  # it gives vectors or scores, and no text
    can_generate: bool = True
    bidirectional: bool = False  # tokens see those after them: computed at once, without KV cache
    position_offset: int = 0  # added to learned positions (RoBERTa)
    token_types: int = 0  # rows of the segment embedding; 0: there is none
    relative_buckets: int = 0  # rows of the bias of distances (MPNet); 0: there is none

    @property
    def output_size(self) -> int:
        """Elements of a pooled vector, or labels."""
        dense = () if self.pooling is None else self.pooling.dense
        return dense[-1].out_features if dense else self.hidden_size


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share block tables: the same attention kind and geometry."""

    layers: tuple[int, ...]
    window_tokens: int  # as in ``ModelSpec.layer_windows``
    num_kv_heads: int
    head_dim: int


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What every process works from: the options, the model, and all that follows from both."""

    config: Config
    spec: ModelSpec
    model_path: str  # local folder or GGUF file
    tokenizer_path: str  # local folder or GGUF file
    served_names: tuple[str, ...]
    device: Literal["cpu", "cuda"]
    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_groups: tuple[KVGroup, ...]

    @property
    def num_front_ends(self) -> int:
        """Front-end processes (the offline ``LLM`` stands for one)."""
        return self.config.server.api_server_count or 1

    @property
    def num_tokenizers(self) -> int:
        """Tokenizer processes (the offline ``LLM`` stands for one)."""
        return self.config.server.tokenizer_pool_size or 1


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """Group the layers of *spec* by attention window, full attention first.

    A bidirectional model has no group: it is computed at once and keeps nothing.
    """
    if spec.bidirectional:
        return ()
    windows = (spec.layer_windows or (0,) * spec.num_layers)[: shared_from(spec)]
    groups = []
    for window in sorted(set(windows), key=abs):
        layers = tuple(i for i, w in enumerate(windows) if w == window)
        kv_heads, head_dim = layer_heads(spec, layers[0])
        groups.append(
            KVGroup(layers=layers, window_tokens=window, num_kv_heads=kv_heads, head_dim=head_dim)
        )
    return tuple(groups)


def first_seen(position: Any, window: int) -> Any:
    """Return the first position that a query at *position* sees; below 0: all are seen.

    Positions are integers or tensors of them. *window*: tokens that slide with the query, 0: no
    limit, -n: chunks of n tokens, of which a query sees its own.
    """
    if window > 0:
        return position + 1 - window
    return position // -window * -window if window else position * 0


def layer_heads(spec: ModelSpec, index: int) -> tuple[int, int]:
    """Return the KV heads of layer *index* and their size."""
    if spec.gemma4 is not None and not spec.layer_windows[index]:
        return spec.gemma4.full_kv_heads, spec.gemma4.full_head_dim
    return spec.num_kv_heads, spec.head_dim


def shared_from(spec: ModelSpec) -> int:
    """Return the first layer that keeps no keys and values of its own; the last ones do not."""
    return spec.num_layers - (0 if spec.gemma4 is None else spec.gemma4.shared_layers)


def check(config: Config) -> None:
    """Raise ConfigError, naming the flag and the limit, if a value is wrong whatever the model."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    server = config.server
    if not model.model:
        raise ConfigError("--model must not be empty")
    among("--dtype", model.dtype, DTYPES)
    among("--load-format", model.load_format, LOAD_FORMATS)
    among("--kv-cache-dtype", cache.kv_cache_dtype, KV_CACHE_DTYPES)
    among("--task", model.task, TASKS)
    among("--runner", model.runner, RUNNERS)
    among("--convert", model.convert, CONVERSIONS)
    if model.skip_tokenizer_init and (model.tokenizer or model.chat_template):
        flag = "--tokenizer" if model.tokenizer else "--chat-template"
        raise ConfigError(f"{flag} has no use with --skip-tokenizer-init: give one of the two")
    if isinstance(model.max_model_len, int) and model.max_model_len not in AUTO_LENGTHS:
        within("--max-model-len", model.max_model_len, 1, MAX_TOKENS)
    within("--seed", model.seed, -(2**63), 2**63 - 1)
    within("--block-size", cache.block_size_tokens, 1, 256)
    if cache.block_size_tokens.bit_count() != 1:
        raise ConfigError(f"--block-size must be a power of two, got {cache.block_size_tokens}")
    if not 0.0 < cache.gpu_memory_utilization <= 1.0:
        got = cache.gpu_memory_utilization
        raise ConfigError(f"--gpu-memory-utilization must be over 0 and at most 1, got {got}")
    within("--kv-cache-memory-bytes", cache.kv_cache_memory_bytes, 1, 2**50)
    within("--num-gpu-blocks-override", cache.num_blocks_override, 2, 2**31 - 1)
    within("--max-num-seqs", scheduler.max_num_seqs, 1, 65536)
    within("--max-num-batched-tokens", scheduler.max_num_batched_tokens, 1, MAX_TOKENS)
    within("--run-ahead-steps", scheduler.run_ahead_steps, 1, 8)
    within("--max-waiting-queue-length", scheduler.max_waiting_seqs, 0, MAX_TOKENS)
    among("--attention-backend", config.compute.attention_backend, ATTENTION_BACKENDS)
    check_parallel(config.parallel)
    if server.tool_call_parser is not None:
        among("--tool-call-parser", server.tool_call_parser, TOOL_CALL_PARSERS)
    if server.reasoning_parser is not None:
        among("--reasoning-parser", server.reasoning_parser, REASONING_PARSERS)
    check_server(server)
    _check_names(config)


def _check_names(config: Config) -> None:
    names = config.model.served_model_name
    if not all(names):
        raise ConfigError("--served-model-name must not be empty")
    if len(set(names)) < len(names):
        raise ConfigError(f"--served-model-name has a name twice: {', '.join(names)}")


def with_purpose(spec: ModelSpec, options: ModelOptions) -> ModelSpec:
    """Return *spec* as it is to be served: for text, or (``pooling`` set) for vectors or scores.

    Without flags the checkpoint decides. Raises ConfigError, naming the flag, for what it is not
    made for.
    """
    flags = [("--task", options.task), ("--runner", options.runner), ("--convert", options.convert)]
    given = [(flag, value) for flag, value in flags if value not in ("auto", "none")]
    text = [f"{flag} {value}" for flag, value in given if value == "generate"]
    vectors = [f"{flag} {value}" for flag, value in given if value != "generate"]
    if text and vectors:
        raise ConfigError(f"{text[0]} and {vectors[0]} contradict each other")
    if text and not spec.can_generate:
        raise ConfigError(f"{text[0]}: this model gives vectors or scores, it generates no text")
    pooling = spec.pooling
    if text or (pooling is None and not vectors):
        return msgspec.structs.replace(spec, pooling=None)
    pooling = pooling or PoolingSpec()
    for flag, value in given:
        if value == "classify" and not pooling.num_labels:
            raise ConfigError(f"{flag} classify: this model has no classification head")
        if value in ("embedding", "embed") and pooling.num_labels:
            raise ConfigError(f"{flag} {value}: this model has a classification head: it scores")
    return msgspec.structs.replace(spec, pooling=pooling)


def resolve(
    config: Config, spec: ModelSpec, *, model_path: str, tokenizer_path: str, device: str
) -> Resolved:
    """Join options and model facts; *device* is ``cpu`` or ``cuda``.

    Raises ConfigError, naming the flag, when they contradict each other.
    """
    check(config)
    check_form(config, spec, device)
    spec = with_purpose(spec, config.model)
    longest = spec.max_position
    pooled_tokens = spec.pooling.max_tokens if spec.pooling is not None else 0
    max_model_len = min(longest, pooled_tokens or longest)  # auto: the most that it comes to
    if isinstance(config.model.max_model_len, int) and config.model.max_model_len > 0:
        max_model_len = config.model.max_model_len
    if max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {max_model_len} exceeds the {longest} tokens the model was made for"
        )
    max_num_seqs = config.scheduler.max_num_seqs or (256 if device == "cuda" else 64)
    budget = config.scheduler.max_num_batched_tokens
    chunked = config.scheduler.enable_chunked_prefill and not spec.bidirectional
    if budget is None:
        budget = 8192 if device == "cuda" else 512 if spec.bidirectional else 256
        if not chunked:
            budget = max(budget, max_model_len)
    if budget < max_num_seqs and config.scheduler.max_num_batched_tokens is not None:
        if config.scheduler.max_num_seqs is not None:
            raise ConfigError(
                f"--max-num-batched-tokens {budget} is less than --max-num-seqs {max_num_seqs}: "
                "a step must have room for one token of every running sequence"
            )
        max_num_seqs = budget
    budget = max(budget, max_num_seqs)
    if not chunked and budget < max_model_len:
        why = "--no-enable-chunked-prefill forbids"
        if spec.bidirectional:
            why = "a model whose tokens see those after them does not allow"
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is less than --max-model-len {max_model_len}, "
            f"which {why}"
        )
    dtype = DTYPE_SPELLINGS.get(config.model.dtype, config.model.dtype)
    if dtype == "auto" and device == "cpu" and config.compute.deterministic:
        dtype = "float32"
    model = msgspec.structs.replace(config.model, dtype=dtype)
    return Resolved(
        config=msgspec.structs.replace(config, model=model),
        spec=spec,
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        served_names=config.model.served_model_name or (config.model.model,),
        device="cuda" if device == "cuda" else "cpu",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        kv_groups=kv_groups(spec),
    )
