"""The engine behind ``LLM``: an engine core and a worker as children of the caller's process.

Owns the runtime directory, the children, the sockets and the tokenizer core of one ``LLM``. To the
children the caller is both the supervisor (it gets Ready, Progress and Fatal) and tokenizer 0 (it
gets EngineReady and StepOutput), and it takes the engine's reports in a front end's stead. Knows
nothing of the forms of prompts or of what the caller gets back: ``Generate`` messages go in, the
tokenizer core's answers come out.

A run is: all requests are tokenized and checked first, and only if none is refused are they
submitted; then messages are passed along until each request has its terminal answer. Whatever ends
a run early (an interrupt above all) aborts its sequences and waits for their last rows, so that
the next run finds an idle engine.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy as np
import zmq

from zlm.config import Config, Resolved
from zlm.errors import BadRequest, Internal, TooLong, ZlmError
from zlm.ipc.sockets import Inbox, address
from zlm.messages import (
    RUNNING,
    Abort,
    Cancel,
    Delta,
    Deltas,
    Detokenize,
    DetokenizedText,
    EngineReady,
    Failed,
    Fatal,
    Generate,
    Launch,
    Pool,
    Pooled,
    Profile,
    Profiled,
    Ready,
    StepOutput,
    Submit,
    TokenBytes,
    ToSupervisor,
    ToTokenizer,
)
from zlm.metrics import EngineStats, engine_stats
from zlm.process.counts import path_of, read
from zlm.process.launch import ProcessGroup
from zlm.process.runtime import RuntimeDirectory
from zlm.supervisor.resolve import resolve_config
from zlm.tokenizer.core import TokenizerCore

# The last word on one request: a delta a sample, its vectors, or its error.
Answer = list[Delta] | Pooled | Failed

CHILDREN = ("engine", "worker")
LAST_WORDS_MS = 500  # how long a dead child's Fatal may still be under way
WATCH_SECONDS = 0.1  # how often the children are looked at while messages are awaited
ABORT_SECONDS = 30.0  # how long an interrupted run waits for its sequences' last rows
PROFILE_SECONDS = 120.0  # how long writing and reading a trace may take
STOP_SECONDS = 10.0  # how long children may take to leave before they are killed

logger = logging.getLogger(__name__)


class OfflineEngine:
    """Engine core, worker and tokenizer core of one ``LLM``. Used by one thread at a time."""

    resolved: Resolved
    _core: TokenizerCore

    def __init__(self, config: Config) -> None:
        """Start the children and return when sequences may be submitted.

        Raises ConfigError, ModelError or Internal; nothing is left behind then.
        """
        # Lifetime: the engine
        self._pid = os.getpid()
        self._closing = ExitStack()
        self._runtime = self._closing.enter_context(RuntimeDirectory())
        self._context = zmq.Context()
        self._closing.callback(self._context.destroy, linger=0)
        self._group = ProcessGroup(self._runtime.path, self._context)
        self._closing.callback(self._group.stop, STOP_SECONDS)
        self._failure: str | None = None
        self._stats = EngineStats()
        self._profiled: Profiled | None = None  # the worker's answer to the last Profile
        self._sequences: set[int] = set()  # submitted, terminal row not seen
        # Lifetime: a run
        self._to_submit: list[Submit] | None = None  # while requests are being checked
        self._num_samples: dict[int, int] = {}  # of each request
        self._deltas: dict[int, list[Delta]] = {}  # of each request, those of ended samples
        self._answers: dict[int, Answer] = {}
        self._text = ""  # the answer to Detokenize
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    def run(
        self, requests: Sequence[Generate | Pool], advance: Callable[[int, int], None]
    ) -> list[Answer]:
        """Answer *requests*, in their order; *advance(requests done, tokens made)* is told news.

        Raises BadRequest or TooLong, naming the index of the first request that is refused, before
        any runs; Internal when a child dies. After KeyboardInterrupt the engine stays usable.
        """
        self._check()
        self._num_samples = {
            request.request_id: request.params.n
            for request in requests
            if isinstance(request, Generate)
        }
        self._deltas = {request.request_id: [] for request in requests}
        self._answers = {}
        with _deferred_interrupt() as interrupt:
            try:
                submits = self._tokenize(requests, interrupt)
                for submit in submits:
                    self._submit(submit)
                done = 0
                while done < len(requests):
                    interrupt.check()
                    tokens = self._receive()
                    advance(len(self._answers) - done, tokens)
                    done = len(self._answers)
            except BaseException:
                self._abandon(requests)
                raise
        return [self._answers[request.request_id] for request in requests]

    def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of *token_ids*, special tokens by name."""
        self._core.handle(Detokenize(request_id=0, token_ids=token_ids))
        return self._text

    def stats(self) -> EngineStats:
        """Return what the engine core has counted so far; after shutdown, what was asked last."""
        if values := read(path_of(self._runtime.path, "engine", 0)):
            self._stats = engine_stats(values)
        return self._stats

    def profile(self, task: Profile) -> Profiled:
        """Have the worker measure steps of the next run, or with ``steps`` 0 return the figures."""
        self._profiled = None
        self._group.send("worker", 0, task)
        deadline = time.monotonic() + PROFILE_SECONDS
        while self._profiled is None:
            if time.monotonic() > deadline:
                raise Internal("the worker does not answer")
            self._watch(int(WATCH_SECONDS * 1000))
        return self._profiled

    def pid(self, role: str) -> int:
        """Return the process id of the child *role*: ``engine`` or ``worker``."""
        return self._group.pid(role)

    def close(self) -> None:
        """End the children and remove what they leave. May be called again, and after a fork."""
        if self._pid == os.getpid():
            self._failure = self._failure or "it was shut down"
            self._closing.close()

    # ------------------------------------------------------------------------------- starting

    def _start(self, config: Config) -> None:
        for role in CHILDREN:
            self._group.spawn(role, 0)
        self._inbox = self._bind("tokenizer", ToTokenizer)
        self._supervisor = self._bind("supervisor", ToSupervisor)
        self.resolved = resolve_config(config)
        self._group.broadcast(Launch(self.resolved))
        self._core = TokenizerCore(
            self.resolved, 0, to_engine=self._to_engine, to_frontend=self._from_core
        )
        self._closing.callback(self._core.close)
        waiting = {"engine ready", *CHILDREN}
        while waiting:
            for message in self._inbox.receive(int(WATCH_SECONDS * 1000)):
                if isinstance(message, EngineReady):
                    self._core.handle(message)
                    waiting.discard("engine ready")
            waiting -= self._watch()

    def _bind(self, role: str, accepts: Any) -> Inbox:
        return Inbox(self._context, address(self._runtime.path, role), accepts)

    # -------------------------------------------------------------------------------- a run

    def _tokenize(
        self, requests: Sequence[Generate | Pool], interrupt: "_Interrupt"
    ) -> list[Submit]:
        """Return what is to be submitted for *requests*; raise for the first that is refused."""
        self._to_submit = []
        try:
            for index, request in enumerate(requests):
                interrupt.check()
                self._core.handle(request)
                refusal = self._answers.get(request.request_id)
                if isinstance(refusal, Failed):
                    raise _as_error(refusal, f"prompt {index}: ")
            return self._to_submit
        except BaseException:
            for request in requests:  # of these the engine core has seen nothing
                self._core.handle(Cancel(request.request_id))
            raise
        finally:
            self._to_submit = None

    def _submit(self, submit: Submit) -> None:
        self._sequences.update(range(submit.seq_id, submit.seq_id + submit.n))
        self._group.send("engine", 0, submit)

    def _receive(self) -> int:
        """Handle what has come, waiting a little for it; return how many tokens were new."""
        tokens = 0
        messages = self._inbox.receive(int(WATCH_SECONDS * 1000))
        for message in messages:
            if isinstance(message, StepOutput):
                tokens += self._note(message)
                self._core.handle(message)
        if not messages or self._watched_at + WATCH_SECONDS < time.monotonic():
            self._watch()
        return tokens

    def _note(self, output: StepOutput) -> int:
        """Strike off the sequences that end in *output*; return how many tokens it holds."""
        finish = np.frombuffer(output.finish, np.uint8)
        if finish.any():
            ended = np.frombuffer(output.seq_ids, np.int64)[finish != RUNNING]
            self._sequences.difference_update(ended.tolist())
        self._sequences.difference_update(error.seq_id for error in output.errors)
        return int(np.count_nonzero(np.frombuffer(output.token_ids, np.int32) >= 0))

    def _abandon(self, requests: Sequence[Generate | Pool]) -> None:
        """Abort what still runs of *requests* and wait for the last rows of its sequences."""
        if self._failure is not None:
            return
        for request in requests:
            if request.request_id not in self._answers:
                self._core.handle(Cancel(request.request_id))
        if self._sequences:
            self._group.send("engine", 0, Abort(sorted(self._sequences)))
        deadline = time.monotonic() + ABORT_SECONDS
        while self._sequences and time.monotonic() < deadline:
            self._receive()
        if self._sequences:
            logger.error("%d sequences did not end when aborted", len(self._sequences))

    # --------------------------------------------------------- what the tokenizer core sends

    def _to_engine(self, message: Submit | Abort | TokenBytes) -> None:
        if self._to_submit is None or isinstance(message, TokenBytes):
            self._group.send("engine", 0, message)
        elif isinstance(message, Submit):
            self._to_submit.append(message)

    def _from_core(self, _: int, message: Any) -> None:
        match message:
            case Deltas():
                for delta in message.items:
                    self._take(delta)
            case Failed() | Pooled() if message.request_id in self._deltas:
                self._answers[message.request_id] = message
            case DetokenizedText():
                self._text = message.text

    def _take(self, delta: Delta) -> None:
        deltas = self._deltas.get(delta.request_id)
        if deltas is None or delta.finish_reason is None:
            return
        deltas.append(delta)
        if len(deltas) == self._num_samples[delta.request_id]:
            self._answers[delta.request_id] = sorted(deltas, key=lambda each: each.index)

    # ------------------------------------------------------------------------- the children

    def _check(self) -> None:
        if self._failure is not None:
            raise Internal(f"this LLM cannot run: {self._failure}")
        self._watch()

    def _watch(self, wait_ms: int = 0) -> set[str]:
        """Return the roles that said Ready since the last look; raise if a child has died.

        Waits up to *wait_ms* for a message.
        """
        self._watched_at = time.monotonic()
        ready = set()
        dead = self._group.poll()
        for message in self._supervisor.receive(LAST_WORDS_MS if dead else wait_ms):
            if isinstance(message, Fatal):
                self._fail(f"the {message.role} failed: {message.text}")
            elif isinstance(message, Ready):
                ready.add(message.role)
            elif isinstance(message, Profiled):
                self._profiled = message
        if dead:
            self._fail(f"the {dead[0].role} process {dead[0].describe()}")
        return ready

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self.close()
        raise Internal(reason)


class _Interrupt:
    """Whether Ctrl-C was pressed since a run began."""

    pressed = False

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was held back."""
        if self.pressed:
            raise KeyboardInterrupt


@contextmanager
def _deferred_interrupt() -> Iterator[_Interrupt]:
    """Hold the first Ctrl-C back to where the run looks for it; the second is raised at once.

    So an interrupt never strikes the tokenizer core in the middle of a change. Where this is not
    the main thread, or the program handles SIGINT itself, nothing is altered.
    """
    interrupt = _Interrupt()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return

    def press(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:
            signal.default_int_handler(number, frame)
        interrupt.pressed = True

    signal.signal(signal.SIGINT, press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.check()


def _as_error(failed: Failed, prefix: str) -> ZlmError:
    """Return the error that *failed* stands for, its message after *prefix*."""
    kinds: dict[bool, type[ZlmError]] = {True: Internal, False: BadRequest}
    kind = TooLong if failed.code == TooLong.code else kinds[failed.status >= 500]
    return kind(
        prefix + failed.message, param=failed.param, code=failed.code, type=failed.error_type
    )
