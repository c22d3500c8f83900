"""The one table of serve's flags: parser, help and the mapping to ``Config`` are made from it.

A row names the flag, the field of ``Config`` that it sets, how its text is read, and what it does.
Defaults are not repeated here: help reads them from ``Config``. Flags that set no field are in
``accepted``, flags of vLLM that zlm lacks in ``unsupported``.
"""

from typing import Any

from zlm.api_keys import without_credentials
from zlm.cli import values
from zlm.cli.argument import Argument
from zlm.cli.arguments_access import ACCESS, SECRET
from zlm.cli.arguments_logs import LOGS
from zlm.cli.arguments_nodes import NODES
from zlm.cli.arguments_requests import REQUESTS
from zlm.config import (
    CONVERSIONS,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    RUNNERS,
    TASKS,
    Config,
    ModelOptions,
)

MODEL = (
    Argument(
        flag="--tokenizer",
        field="model.tokenizer",
        metavar="PATH|ID",
        parse=values.text,
        help="where the tokenizer comes from",
        default="the model",
    ),
    Argument(
        flag="--skip-tokenizer-init",
        field="model.skip_tokenizer_init",
        help="load no tokenizer: prompts and answers are token ids",
    ),
    Argument(
        flag="--revision",
        field="model.revision",
        metavar="NAME",
        parse=values.text,
        help="branch, tag or commit of a Hugging Face id",
        default="main",
    ),
    Argument(
        flag="--download-dir",
        field="model.download_dir",
        metavar="FOLDER",
        parse=values.text,
        help="where downloads are kept",
        default="the Hugging Face cache",
    ),
    Argument(
        flag="--dtype",
        field="model.dtype",
        metavar="TYPE",
        parse=values.choice(*DTYPES),
        help="type to compute in: auto, float32, bfloat16, float16 (needs a GPU)",
    ),
    Argument(
        flag="--max-model-len",
        field="model.max_model_len",
        metavar="N",
        parse=values.max_model_len,
        help="most tokens of prompt and output together; 8k is 8000, 8K is 8192; auto: what fits "
        "the memory",
        default="what the model was made for",
    ),
    Argument(
        flag="--served-model-name",
        field="model.served_model_name",
        metavar="NAME...",
        parse=values.names,
        takes="words",
        help="names that clients may ask for",
        default="MODEL",
    ),
    Argument(
        flag="--load-format",
        field="model.load_format",
        metavar="FORMAT",
        parse=values.choice(*LOAD_FORMATS),
        help=f"{', '.join(LOAD_FORMATS)} (random weights)",
    ),
    Argument(
        flag="--quantization",
        field="model.quantization",
        metavar="METHOD",
        parse=values.text,
        spellings=("-q",),
        help="fp8 or w4a16 quantize a plain checkpoint as a GPU reads it; others are checked",
        default="the checkpoint decides",
    ),
    Argument(
        flag="--generation-config",
        field="model.generation_config",
        metavar="WHERE",
        parse=lambda value: "none" if value in ("vllm", "zlm") else values.text(value),
        help="sampling defaults: auto (the checkpoint's), none, or a folder",
    ),
    Argument(
        flag="--chat-template",
        field="model.chat_template",
        metavar="FILE",
        parse=values.chat_template,
        help="a Jinja file, or the template itself",
        default="the checkpoint's",
    ),
    Argument(
        flag="--runner",
        field="model.runner",
        metavar="RUNNER",
        parse=values.choice(*RUNNERS),
        help="generate (text), pooling (embeddings and scores), or auto: as the checkpoint is",
    ),
    Argument(
        flag="--convert",
        field="model.convert",
        metavar="KIND",
        parse=values.choice(*CONVERSIONS),
        help="embed makes an embedding model of a model of text; none, classify, auto",
    ),
    Argument(
        flag="--task",
        field="model.task",
        metavar="TASK",
        parse=values.choice(*TASKS),
        help="an older name of both: auto, generate, embedding (or embed), classify, score",
    ),
    Argument(
        flag="--seed",
        field="model.seed",
        metavar="N",
        parse=values.integer,
        help="seeds requests that bring no seed",
        default="fresh randomness",
    ),
)

CACHE = (
    Argument(
        flag="--block-size",
        field="cache.block_size_tokens",
        metavar="TOKENS",
        parse=values.integer,
        help="tokens in a block of the KV cache",
    ),
    Argument(
        flag="--gpu-memory-utilization",
        field="cache.gpu_memory_utilization",
        metavar="FRACTION",
        parse=values.number,
        help="share of the GPU's memory that may be used",
    ),
    Argument(
        flag="--kv-cache-dtype",
        field="cache.kv_cache_dtype",
        metavar="TYPE",
        parse=values.choice(*KV_CACHE_DTYPES),
        help=f"type of keys and values: {', '.join(KV_CACHE_DTYPES)}",
    ),
    Argument(
        flag="--kv-cache-memory-bytes",
        field="cache.kv_cache_memory_bytes",
        metavar="SIZE",
        parse=values.size_bytes,
        help="size of the KV cache: 1073741824, 8GB, 512MiB",
        default="planned from the memory there is",
    ),
    Argument(
        flag="--num-gpu-blocks-override",
        field="cache.num_blocks_override",
        metavar="N",
        parse=values.integer,
        help="blocks of the KV cache, whatever the plan says",
        default="the plan",
    ),
    Argument(
        flag="--enable-prefix-caching",
        field="cache.enable_prefix_caching",
        help="reuse the KV cache of equal beginnings of prompts",
    ),
)

SCHEDULER = (
    Argument(
        flag="--max-num-seqs",
        field="scheduler.max_num_seqs",
        metavar="N",
        parse=values.quantity,
        help="most sequences that run at once",
        default="256 on a GPU, 64 on the CPU",
    ),
    Argument(
        flag="--max-num-batched-tokens",
        field="scheduler.max_num_batched_tokens",
        metavar="N",
        parse=values.quantity,
        help="most tokens of one step",
        default="8192 on a GPU, 256 on the CPU",
    ),
    Argument(
        flag="--enable-chunked-prefill",
        field="scheduler.enable_chunked_prefill",
        help="compute long prompts in several steps, beside running requests",
    ),
    Argument(
        flag="--scheduling-policy",
        field="scheduler.policy",
        metavar="POLICY",
        parse=values.choice("fcfs", "priority"),
        help="who goes first: fcfs (first come) or priority (the request's)",
    ),
    Argument(
        flag="--run-ahead-steps",
        field="scheduler.run_ahead_steps",
        metavar="N",
        parse=values.integer,
        help="steps that are planned before the first of them has ended",
    ),
    Argument(
        flag="--max-waiting-queue-length",
        field="scheduler.max_waiting_seqs",
        metavar="N",
        parse=values.quantity,
        help="most sequences that wait for room; more are answered with 503",
        default="no limit",
    ),
)

COMPUTE = (
    Argument(
        flag="--device",
        field="parallel.device",
        metavar="DEVICE",
        parse=values.choice("auto", "cpu", "cuda"),
        help="auto (a GPU if there is one), cuda or cpu",
    ),
    Argument(
        flag="--enforce-eager",
        field="compute.enforce_eager",
        help="no CUDA graphs: a quicker start, slower steps",
    ),
    Argument(
        flag="--deterministic",
        field="compute.deterministic",
        help="the same tokens in any company, on a GPU too; somewhat slower there",
    ),
    Argument(
        flag="--attention-backend",
        field="compute.attention_backend",
        metavar="NAME",
        parse=values.attention_backend,
        help="attention on a GPU: auto, triton, or sdpa (torch's)",
    ),
    Argument(
        flag="--tensor-parallel-size",
        field="parallel.tensor_parallel_size",
        metavar="N",
        parse=values.integer,
        spellings=("-tp",),
        help="GPUs (on a CPU: processes) that share each layer",
    ),
    Argument(
        flag="--pipeline-parallel-size",
        field="parallel.pipeline_parallel_size",
        metavar="N",
        parse=values.integer,
        spellings=("-pp",),
        help="stages, each of which has some of the layers",
    ),
    Argument(
        flag="--cpu-threads",
        field="parallel.cpu_threads",
        metavar="N",
        parse=values.integer,
        help="threads that compute on the CPU",
        default="its cores",
    ),
)

SERVER = (
    Argument(
        flag="--host",
        field="server.host",
        metavar="HOST",
        parse=values.text,
        help="address to listen on; 0.0.0.0 for all of this machine's",
    ),
    Argument(
        flag="--port",
        field="server.port",
        metavar="PORT",
        parse=values.integer,
        help="port to listen on; 0 for any that is free",
    ),
    Argument(
        flag="--uds",
        field="server.uds",
        metavar="PATH",
        parse=values.text,
        help="listen on a Unix socket instead",
        default="off",
    ),
    Argument(
        flag="--root-path",
        field="server.root_path",
        metavar="PREFIX",
        parse=str,
        help="path under which a reverse proxy serves",
        default="none",
    ),
    Argument(
        flag="--api-server-count",
        field="server.api_server_count",
        metavar="N",
        parse=values.integer,
        spellings=("-asc",),
        help="front-end processes",
        default="1, with a GPU one for 4 CPUs, at most 4",
    ),
    Argument(
        flag="--tokenizer-pool-size",
        field="server.tokenizer_pool_size",
        metavar="N",
        parse=values.integer,
        help="tokenizer processes",
        default="1, with a GPU one for 8 CPUs, at most 4",
    ),
    Argument(
        flag="--shutdown-timeout",
        field="server.shutdown_timeout_seconds",
        metavar="SECONDS",
        parse=values.number,
        help="how long running requests may finish after SIGTERM",
    ),
    Argument(
        flag="--health-timeout",
        field="server.health_timeout_seconds",
        metavar="SECONDS",
        parse=values.number,
        help="how long a process may make no progress until /health says 503",
    ),
    Argument(
        flag="--hang-timeout",
        field="server.hang_timeout_seconds",
        metavar="SECONDS",
        parse=values.number,
        help="how long a process may make no progress until it is replaced",
    ),
    Argument(
        flag="--startup-timeout",
        field="server.startup_timeout_seconds",
        metavar="SECONDS",
        parse=values.number,
        help="how long a start may go without news of its progress until it is given up",
    ),
    Argument(
        flag="--max-restarts",
        field="server.max_restarts",
        metavar="N",
        parse=values.integer,
        help="restarts of a process in 10 minutes, or in a row, until the server gives up",
    ),
)

GROUPS: dict[str, tuple[Argument, ...]] = {
    "Model": MODEL,
    "KV cache": CACHE,
    "Scheduler": SCHEDULER,
    "Compute": COMPUTE,
    "Several machines": NODES,
    "Server": SERVER,
    "Keys and TLS": ACCESS,
    "Requests": REQUESTS,
    "Logs": LOGS,
}
ARGUMENTS: tuple[Argument, ...] = tuple(row for group in GROUPS.values() for row in group)


def changed(config: Config) -> list[str]:
    """Return ``flag value`` of each flag that *config* changes from its default; keys hidden."""
    plain = Config(model=ModelOptions(model=config.model.model))
    different = (row for row in ARGUMENTS if row.value_in(config) != row.value_in(plain))
    return [f"{row.flag} {_shown(row, row.value_in(config))}" for row in different]


def _shown(row: Argument, value: Any) -> str:
    if row.field in SECRET:
        return "..."
    text = " ".join(map(repr, value)) if isinstance(value, tuple) else str(value)
    return without_credentials(text)
