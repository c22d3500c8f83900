"""``zlm serve`` with faulty workers: run with the arguments of the same.

They fail at certain token ids, or, with $ENDLESS_START, never end their start.
"""

import os
import sys
from pathlib import Path

from zlm.cli.parse import parse
from zlm.process.launch import module_command
from zlm.process.logs import start_logging
from zlm.supervisor.main import serve


def command(role: str) -> list[str]:
    if role == "worker":
        kind = "endless" if "ENDLESS_START" in os.environ else "faulty"
        return [sys.executable, "-P", str(Path(__file__).with_name(f"{kind}_worker.py"))]
    return module_command(role)


if __name__ == "__main__":
    config, _ = parse(sys.argv[1:])
    start_logging("supervisor")
    sys.exit(serve(config, command=command))
