"""A ``zlm serve`` under measurement, on a model or on a shape of ``bench/shapes``.

What starts and measures it is zlm's own (``zlm.loadtest.servers``); shapes are known here alone.
"""

from pathlib import Path

from zlm.loadtest.servers import (
    ServerProcess,
    command_name as command_name,
    gpu_memory_mib as gpu_memory_mib,
    memory_bytes as memory_bytes,
    serve_command,
    tree as tree,
)

SHAPES = Path(__file__).with_name("shapes")


def model_and_flags(target: str, flags: list[str]) -> tuple[str, list[str]]:
    """Return what zlm serve is given for *target*: a model, or a shape with random weights.

    A shape has no tokenizer, unless *flags* bring one.
    """
    shape = SHAPES / target
    if Path(target).name != target or not shape.is_dir():  # a path is never a shape
        return target, flags
    without = [] if "--tokenizer" in flags else ["--skip-tokenizer-init"]
    return str(shape), ["--load-format", "dummy", *without, *flags]


def split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a bench's arguments at ``--``: its own, and the flags for zlm serve."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


class Server(ServerProcess):
    """One ``zlm serve``, from exec to its end, on a model or on a name of ``shapes``."""

    def __init__(
        self,
        target: str,
        flags: list[str],
        *,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Start it and wait until it is ready."""
        model, flags = model_and_flags(target, flags)
        super().__init__(
            [*self.command(model), *flags],
            environment=environment,
            log=log,
            timeout_seconds=timeout_seconds,
        )

    def command(self, model: str) -> list[str]:
        """Return the command that serves *model*, less its flags."""
        return serve_command(model, [])
