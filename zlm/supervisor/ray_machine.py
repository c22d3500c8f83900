"""What Ray runs on each machine of an engine: an actor, and under it the supervisor of a node.

``python -m zlm.supervisor.ray_machine`` is that supervisor; its ``Config`` comes on standard input.
"""

import os
import subprocess
import sys

import msgspec

from zlm.config import Config
from zlm.process.linux import kill_when_parent_ends
from zlm.supervisor.node import Node


class Machine:
    """An actor: one machine's share of the cluster."""

    def gpus(self) -> list[str]:
        """Return which GPUs are this actor's, as CUDA_VISIBLE_DEVICES has them."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def run(self, config: str, environment: dict[str, str]) -> tuple[int, str]:
        """Be a node of an engine as *config*, JSON, says; return exit status and last words.

        All that it says goes to Ray's logs.
        """
        node = subprocess.Popen(
            [sys.executable, "-m", "zlm.supervisor.ray_machine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
            preexec_fn=kill_when_parent_ends,
        )
        assert node.stdin is not None and node.stdout is not None
        node.stdin.write(config)
        node.stdin.close()
        line = ""
        for line in node.stdout:
            print(line, end="", flush=True)
        return node.wait(), line.strip()


def main() -> int:
    """Be a node; return the exit status."""
    fault = Node(msgspec.json.decode(sys.stdin.buffer.read(), type=Config)).run()
    if fault is not None:
        print(f"zlm: {fault}", file=sys.stderr, flush=True)
    return 0 if fault is None else 1


if __name__ == "__main__":
    sys.exit(main())
