"""``--max-model-len auto``: the longest context that fits, asked of a process that has torch."""

import logging
import subprocess
import sys

import msgspec

from zlm.config import Config, Resolved
from zlm.errors import ConfigError, Internal

COMMAND = [sys.executable, "-P", "-m", "zlm.worker.longest"]
ANSWER_SECONDS = 180.0  # torch comes from a cold disk, and CUDA starts

logger = logging.getLogger(__name__)


class Answer(msgspec.Struct, frozen=True):
    """What ``zlm.worker.longest`` says: one of the two."""

    tokens: int = 0
    error: str = ""


def fitted(resolved: Resolved) -> Config:
    """Return the config of *resolved*, with the longest context for ``auto``.

    Raises ConfigError if none fits.
    """
    done = subprocess.run(
        COMMAND,
        input=msgspec.json.encode(resolved),
        stdout=subprocess.PIPE,
        timeout=ANSWER_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise Internal(f"--max-model-len auto: the plan failed with status {done.returncode}")
    answer = msgspec.json.decode(done.stdout, type=Answer)
    if answer.error or not answer.tokens:
        raise ConfigError(answer.error or "--max-model-len auto: no context fits the memory")
    made_for = resolved.max_model_len
    logger.info("--max-model-len auto: %d tokens of %d fit", answer.tokens, made_for)
    options = msgspec.structs.replace(resolved.config.model, max_model_len=answer.tokens)
    return msgspec.structs.replace(resolved.config, model=options)
