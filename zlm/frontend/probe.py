"""The server's first request, which it makes to itself: one token (or vector), all the way round.

Only when it has come is the server said to be ready. It is an open request like any other, with
nobody to answer but the supervisor.
"""

import time
from collections.abc import Callable
from typing import Any

from zlm.config import Resolved
from zlm.errors import ZlmError
from zlm.frontend.open_requests import OpenRequests
from zlm.messages import Delta, Generate, Pool
from zlm.pooling_params import PoolingParams
from zlm.sampling_params import SamplingParams


class ProbeRequest:
    """An open request whose end is told to *answer*: what went wrong, or an empty text."""

    def __init__(self, release: Callable[[], None], answer: Callable[[str], None]) -> None:
        self._release = release
        self._answer = answer

    def take(self, delta: Delta) -> bool:
        if delta.finish_reason is not None:
            made = delta.num_output_tokens > 0 and delta.finish_reason != "abort"
            self._end("" if made else f"no token came out, it ended with {delta.finish_reason}")
        return False

    def flush(self) -> None:
        """Nothing is ever kept."""

    def finish(self, result: Any) -> None:
        self._end("")

    def fail(self, error: ZlmError) -> None:
        self._end(error.message)

    def _end(self, problem: str) -> None:
        self._release()
        self._answer(problem)


def send_probe(requests: OpenRequests, resolved: Resolved, answer: Callable[[str], None]) -> None:
    """Have one token made, of a prompt that every model can read: a single token id."""
    request_id = requests.new_id()
    bos = resolved.spec.bos_token_id
    prompt: list[str | list[int]] = [[0 if bos is None else bos]]
    probe = ProbeRequest(lambda: requests.release(request_id), answer)
    now = time.monotonic()
    command: Generate | Pool
    if resolved.spec.pooling is not None:
        command = Pool(request_id, now, prompt, PoolingParams())
    else:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        command = Generate(request_id, now, prompt, params)
    try:
        requests.submit(request_id, command, probe)
    except ZlmError as error:
        answer(error.message)
