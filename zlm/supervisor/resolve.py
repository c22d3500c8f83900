"""From options to what every process works from: finds the checkpoint and reads its facts.

Pure wiring of ``zlm.weights.resolve``, ``zlm.models.config``, ``zlm.supervisor.device`` and
``zlm.config``; may take long (a download), so the supervisor calls it in a thread. The readers are
imported in that thread too: a server's processes start before its supervisor has loaded them.
"""

import logging
from collections.abc import Callable

from zlm.config import Config, Resolved, resolve
from zlm.supervisor.device import find_device

logger = logging.getLogger(__name__)


def resolve_config(config: Config, report: Callable[[str], None] | None = None) -> Resolved:
    """Find the model that *config* names and the device, read their facts and join all.

    *report* is told in words how far a download is; it is called in this thread or another.
    Raises ConfigError or ModelError, in words for the user.
    """
    from zlm.models.config import load_spec
    from zlm.weights.resolve import resolve_model, resolve_tokenizer

    device = find_device(config.parallel.device)
    for line in idle_flags(config, device):
        logger.info("%s", line)
    options = config.model
    where = {"revision": options.revision, "download_dir": options.download_dir}
    model_path = resolve_model(options.model, report=report, **where)
    tokenizer_path = model_path
    if options.tokenizer is not None:
        tokenizer_path = resolve_tokenizer(options.tokenizer, **where)
    spec = load_spec(model_path, generation_config=options.generation_config)
    return resolve(
        config, spec, model_path=model_path, tokenizer_path=tokenizer_path, device=device
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
