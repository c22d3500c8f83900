"""The whole ring for a model that gives vectors, in one process: tokenizer, engine core, worker.

    engine = PooledEngine(folder, max_num_batched_tokens=64)
    vectors = engine.pool(["a text", [5, 6, 7]])          # float32 arrays, one an input

No sockets: messages are handed on by calls, and pass through the encoder as they would.
"""

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from zlm.config import Config, ModelOptions, Resolved, SchedulerOptions, resolve
from zlm.engine.core import EngineCore
from zlm.messages import Abort, Failed, Pool, Pooled, StepOutput, Submit, ToEngine, ToWorker
from zlm.models.config import load_spec
from zlm.pooling_params import PoolingParams
from zlm.tokenizer.core import TokenizerCore
from zlm.worker.pooling_startup import start

TO_ENGINE, TO_WORKER = msgspec.msgpack.Decoder(ToEngine), msgspec.msgpack.Decoder(ToWorker)


def resolved_for(folder: Path, scheduler: dict[str, Any], **model: Any) -> Resolved:
    """Return what a server on *folder* would work from, on the CPU."""
    options = ModelOptions(model=str(folder), **model)
    config = Config(model=options, scheduler=SchedulerOptions(**scheduler))
    path = str(folder)
    return resolve(config, load_spec(path), model_path=path, tokenizer_path=path, device="cpu")


class PooledEngine:
    """One model; ``refused`` holds the errors of the last call."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """*options*: keywords of SchedulerOptions and of ModelOptions."""
        names = SchedulerOptions.__struct_fields__
        scheduler = {name: options.pop(name) for name in names if name in options}
        self.resolved = resolved_for(folder, scheduler, **options)
        self.runner, ready, _ = start(self.resolved, 0, lambda _: None)
        self.core = EngineCore(self.resolved, ready.num_blocks, verify=True)
        self._submitted: deque[Submit | Abort] = deque()
        self._answers: dict[int, Pooled | Failed] = {}
        self.tokenizer = TokenizerCore(
            self.resolved,
            0,
            to_engine=self._submitted.append,
            to_frontend=lambda _, message: self._take(message),
        )
        self.tokenizer.handle(self.core.ready("cpu", ready.dtype))
        self.refused: list[Failed] = []
        self.steps: list[int] = []  # tokens of each step of the last call
        self._next_id = 1

    def _take(self, message: Any) -> None:
        self._answers[message.request_id] = message

    def pool(self, prompts: list[Any], seconds: list[str] | None = None, **params: Any) -> Any:
        """Return the vector of each of *prompts*, all sent as one request."""
        return self.pool_all([(prompts, seconds or [], params)])[0]

    def pool_all(self, requests: list[tuple[list[Any], list[str], dict[str, Any]]]) -> list[Any]:
        """Return the vectors of each of *requests*, all sent at once; None for those refused."""
        first, self._next_id = self._next_id, self._next_id + len(requests)
        self._answers, self.refused, self.steps = {}, [], []
        for number, (prompts, seconds, params) in enumerate(requests):
            pool = Pool(first + number, 0.0, prompts, PoolingParams(**params), seconds)
            self.tokenizer.handle(pool)
        self._run()
        found = []
        for number in range(len(requests)):
            answer = self._answers[first + number]
            if isinstance(answer, Failed):
                self.refused.append(answer)
                found.append(None)
            else:
                found.append([np.frombuffer(vector, "<f4") for vector in answer.vectors])
        return found

    def _run(self) -> None:
        encode = msgspec.msgpack.encode
        while self._submitted or not self.core.is_idle:
            while self._submitted:
                message = TO_ENGINE.decode(encode(self._submitted.popleft()))
                if isinstance(message, Abort):
                    self._tell(self.core.abort(message, 0.0))
                else:
                    self._tell(self.core.submit(message))
            for step in self.core.next_steps(0.0):
                self.steps.append(int(np.frombuffer(step.counts, np.int32).sum()))
                self.runner.launch(TO_WORKER.decode(encode(step)))
            while self.runner.in_flight:
                result = TO_ENGINE.decode(encode(self.runner.collect()))
                self._tell(self.core.apply(result, 0.0))
            self.core.scheduler.check()
        self.core.check_idle()

    def _tell(self, outputs: list[tuple[int, StepOutput]]) -> None:
        for _, output in outputs:
            raw = msgspec.msgpack.encode(output)
            self.tokenizer.handle(msgspec.msgpack.decode(raw, type=StepOutput))
