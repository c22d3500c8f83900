"""From options to what every process works from: finds the checkpoint and reads its facts.

Pure wiring of ``zlm.weights.resolve``, ``zlm.models.config``, ``zlm.supervisor.device`` and
``zlm.config``; may take long (a download), so the supervisor calls it in a thread. The readers are
imported in that thread too: a server's processes start before its supervisor has loaded them.
"""

import logging
from collections.abc import Callable

from zlm.config import AUTO_LENGTHS, Config, Resolved, resolve
from zlm.errors import ConfigError
from zlm.supervisor.device import find_device
from zlm.supervisor.fit import fitted
from zlm.worker import memory_plan

logger = logging.getLogger(__name__)


def resolve_config(config: Config, report: Callable[[str], None] | None = None) -> Resolved:
    """Find the model that *config* names and the device, read their facts and join all.

    *report* is told in words how far a download is; it is called in this thread or another.
    Raises ConfigError or ModelError, in words for the user.
    """
    from zlm.models import shares
    from zlm.models.config import load_spec
    from zlm.weights.resolve import resolve_model, resolve_tokenizer

    parallel = config.parallel
    device = find_device(parallel.device, parallel.workers_per_node)
    for line in idle_flags(config, device):
        logger.info("%s", line)
    options = config.model
    where = {"revision": options.revision, "download_dir": options.download_dir}
    model_path = resolve_model(options.model, report=report, **where)
    tokenizer_path = model_path
    if options.tokenizer is not None:
        tokenizer_path = resolve_tokenizer(options.tokenizer, **where)
    spec = load_spec(model_path, generation_config=options.generation_config)
    shares.check(spec, parallel.tensor_parallel_size)
    shares.check_stages(spec, parallel.pipeline_parallel_size)
    paths = {"model_path": model_path, "tokenizer_path": tokenizer_path}
    resolved = resolve(config, spec, device=device, **paths)
    if options.max_model_len in AUTO_LENGTHS and resolved.kv_groups:
        resolved = resolve(fitted(resolved), spec, device=device, **paths)
    check_cache(resolved)
    return resolved


def check_cache(resolved: Resolved) -> None:
    """Raise ConfigError if --kv-cache-memory-bytes surely holds no sequence of full length.

    The worker knows for certain, but only once it has loaded the weights.
    """
    cache, wanted = resolved.config.cache, memory_plan.demand(resolved)
    given = cache.kv_cache_memory_bytes
    if given is None or cache.num_blocks_override is not None:
        return
    element = 1 if cache.kv_cache_dtype.startswith("fp8") else 2  # bytes, or more
    least = 0
    for group in resolved.kv_groups:
        token = 2 * group.num_kv_heads * group.head_dim * element * len(group.layers)
        facts = memory_plan.GroupFacts(group.window_tokens, token * cache.block_size_tokens)
        least += (memory_plan.blocks_of_sequence(facts, wanted) + 1) * facts.block_bytes
    least //= resolved.config.parallel.num_workers
    if given < least:
        raise ConfigError(
            f"--kv-cache-memory-bytes {given} is less than what one sequence of --max-model-len "
            f"{resolved.max_model_len} tokens needs, at least {least}: raise it, or lower "
            "--max-model-len"
        )


def idle_flags(config: Config, device: str) -> list[str]:
    """Return a line for each option that *config* sets and that changes nothing on *device*."""
    if device == "cuda":
        return []
    compute, lines = config.compute, []
    if compute.enforce_eager:
        lines.append("--enforce-eager: there are no CUDA graphs on the CPU, steps run eagerly")
    if compute.deterministic:
        lines.append("--deterministic: the CPU computes so in float32, which it does now")
    if compute.attention_backend != "auto":
        name = compute.attention_backend
        lines.append(f"--attention-backend {name}: the CPU has one way to compute attention")
    return lines
