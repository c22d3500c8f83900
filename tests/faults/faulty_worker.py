"""A worker that fails in one of four ways when a prompt holds the token id of it."""

from typing import Any

import msgspec
import numpy as np
import torch

from zlm.messages import Execute, StepResult
from zlm.process.child import run
from zlm.worker import process, startup

EXCEPTION, NO_MEMORY, ENDLESS, WRONG_RESULT = range(300, 304)


class FaultyRunner:
    """A runner in front of the real one."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._is_wrong = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, message: Execute) -> None:
        for join in message.joins:
            ids = np.frombuffer(join.token_ids, np.int32)
            if EXCEPTION in ids:
                raise RuntimeError("a kernel went wrong")
            if NO_MEMORY in ids:
                torch.empty(1 << 60)
            while ENDLESS in ids:
                pass
            self._is_wrong |= WRONG_RESULT in ids
        self._runner.launch(message)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        return msgspec.structs.replace(result, step=result.step + 1000 * self._is_wrong)


real_start = startup.start


def start(*arguments: Any) -> startup.Started:
    started = real_start(*arguments)
    return startup.Started(FaultyRunner(started.runner), started.ready)


if __name__ == "__main__":
    startup.start = start
    run("worker", process.serve)
