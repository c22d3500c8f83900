"""The engine behind ``LLM`` and ``AsyncLLM``: engine core and worker as children of the caller.

Owns the runtime directory, the children, the sockets and the tokenizer core. To the children the
caller is both the supervisor (it gets Ready, Progress and Fatal) and tokenizer 0 (it gets
EngineReady and StepOutput), and it takes the engine's reports in a front end's stead. Knows nothing
of the forms of prompts or of what the caller gets back: ``Generate`` and ``Pool`` messages go in,
and whoever asked is told the tokenizer core's news of them.

Whoever drives it calls ``pump`` until it has what it waits for: ``open`` begins one request, which
is told of as it comes, and ``run`` answers many: all are tokenized and checked first, and only if
none is refused are they submitted. What ends a run early (an interrupt above all) aborts its
sequences and waits for their last rows, so that the next run finds an idle engine.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from zlm.config import Config, Resolved, check
from zlm.errors import BadRequest, Internal, TooLong, ZlmError
from zlm.ipc.sockets import Inbox, address
from zlm.messages import (
    RUNNING,
    Abort,
    Administer,
    Administered,
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

# What whoever asked is told of a request, and the last word on it: a delta a sample, or ...
News = Delta | Pooled | Failed
Answer = list[Delta] | Pooled | Failed

ENGINE_READY = ("engine ready", 0)  # what is awaited beside each child's Ready
LAST_WORDS_MS = 500  # how long a dead child's Fatal may still be under way
WATCH_MS = 100  # how often the children are looked at while messages are awaited
ABORT_SECONDS = 30.0  # how long an interrupted run waits for its sequences' last rows
ANSWER_SECONDS = 120.0  # how long a child may take to answer: writing a trace takes time
STOP_SECONDS = 10.0  # how long children may take to leave before they are killed

logger = logging.getLogger(__name__)
R = TypeVar("R", Generate, Pool)
RunLater = Callable[[Callable[[], None]], object]


class Pending:
    """The answer to one request, which is put together; None while it is not there."""

    def __init__(self, request: Generate | Pool, on_end: Callable[[], object]) -> None:
        """*on_end* is called once, when the answer is there."""
        self.answer: Answer | None = None
        self._on_end = on_end
        self._num_samples = request.params.n if isinstance(request, Generate) else 0
        self._ended: list[Delta] = []

    def take(self, news: News) -> None:
        """Take what is new of the request, which is not streamed."""
        if not isinstance(news, Delta):
            self.answer = news
            self._on_end()
            return
        self._ended.append(news)
        if len(self._ended) == self._num_samples:
            self.answer = sorted(self._ended, key=lambda each: each.index)
            self._on_end()


class OfflineEngine:
    """Engine core, worker and tokenizer core of one ``LLM``. Used by one thread at a time."""

    resolved: Resolved
    _core: TokenizerCore

    def __init__(self, config: Config, run_later: RunLater | None = None) -> None:
        """Start the children and return when sequences may be submitted.

        *run_later* is as ``TokenizerCore`` takes it. Raises ConfigError, ModelError or Internal;
        nothing is left behind then.
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
        self._next_id = 0
        self._takers: dict[int, Callable[[News], None]] = {}  # of open requests
        self._calls = 0  # of administration
        # Lifetime: a run
        self._to_submit: list[Submit] | None = None  # while requests are being checked
        self._sequences: set[int] = set()  # submitted, terminal row not seen
        # Lifetime: a call
        self._text = ""  # the answer to Detokenize
        self._administered: Administered | None = None
        try:
            self._start(config, run_later)
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> str | None:
        """Why it can do nothing any more; None while it can."""
        return self._failure

    @property
    def descriptors(self) -> tuple[int, int]:
        """What becomes readable when ``pump`` has something to do."""
        return self._inbox.descriptor, self._supervisor.descriptor

    @property
    def num_open(self) -> int:
        """Number of requests that somebody waits for."""
        return len(self._takers)

    def numbered(self, requests: Sequence[R]) -> list[R]:
        """Return *requests*, each under an id of its own, as of now."""
        now, first = time.monotonic(), self._next_id
        self._next_id += len(requests)
        return [
            msgspec.structs.replace(request, request_id=first + i, arrival=now)
            for i, request in enumerate(requests)
        ]

    def open(self, request: Generate | Pool, take: Callable[[News], None]) -> None:
        """Begin *request*; *take* is told its news, a refusal at once, until it is closed."""
        self._check()
        self._takers[request.request_id] = take
        self._core.handle(request)

    def close_request(self, request_id: int) -> None:
        """Stop the work on a request, if there is any left; nothing more is told of it."""
        if self._takers.pop(request_id, None) is not None and self._failure is None:
            self._core.handle(Cancel(request_id))

    def pump(self, timeout_ms: int = WATCH_MS) -> int:
        """Handle what has come, waiting up to *timeout_ms* for it; return how many tokens were new.

        Raises Internal if a child has died.
        """
        self._check_alive()
        tokens = 0
        messages = self._receive(self._inbox, timeout_ms)
        for message in messages:
            if isinstance(message, StepOutput):
                tokens += self._note(message)
                self._core.handle(message)
        if not messages or self._watched_at + WATCH_MS / 1000 < time.monotonic():
            self._watch()
        return tokens

    def run(
        self, requests: Sequence[Generate | Pool], advance: Callable[[int, int], None]
    ) -> list[Answer]:
        """Answer *requests*, in their order; *advance(requests done, tokens made)* is told news.

        The first of them run while others are still tokenized. Raises BadRequest or TooLong, naming
        the index of the first request that is refused, and aborts those that run; Internal when a
        child dies. After KeyboardInterrupt the engine stays usable.
        """
        self._check()
        ended: list[None] = []
        pending = {r.request_id: Pending(r, lambda: ended.append(None)) for r in requests}
        self._takers |= {request_id: each.take for request_id, each in pending.items()}
        with deferred_interrupt() as interrupt:
            try:
                done, rest = 0, enumerate(requests)
                while done < len(requests):
                    interrupt.check()
                    part = self._tokenize(rest, pending, interrupt)
                    for submit in part:
                        self._submit(submit)
                    tokens = self.pump(0 if part else WATCH_MS)
                    advance(len(ended) - done, tokens)
                    done = len(ended)
            except BaseException:
                self._abandon(pending)
                raise
            finally:
                for request_id in pending:
                    self._takers.pop(request_id, None)
        return [each.answer for each in pending.values() if each.answer is not None]

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
        self._wait(lambda: self._profiled is not None, "worker")
        assert self._profiled is not None
        return self._profiled

    def reset_prefix_cache(self) -> int:
        """Forget what is kept of prompts; return how many blocks that were."""
        self._check()
        self._calls += 1
        self._administered = None
        self._group.send("engine", 0, Administer(self._calls, "reset_prefix_cache"))
        self._wait(lambda: self._administered is not None, "engine")
        assert self._administered is not None
        return self._administered.count

    def _wait(self, is_answered: Callable[[], bool], role: str) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not is_answered():
            if time.monotonic() > deadline:
                raise Internal(f"the {role} does not answer")
            self._watch(WATCH_MS)

    def pid(self, role: str) -> int:
        """Return the process id of the child *role*: ``engine`` or ``worker``."""
        return self._group.pid(role)

    def close(self) -> None:
        """End the children and remove what they leave. May be called again, and after a fork."""
        if self._pid != os.getpid():
            return
        self._failure = self._failure or "it was shut down"
        self._closing.close()
        error = self._unusable()
        for request_id, take in list(self._takers.items()):
            take(Failed(request_id, error.status, error.type, error.message))
        self._takers.clear()

    # ------------------------------------------------------------------------------- starting

    def _start(self, config: Config, run_later: RunLater | None) -> None:
        check(config)
        workers = [("worker", rank) for rank in range(config.parallel.num_workers)]
        children = [("engine", 0), *workers]
        for role, index in children:
            self._group.spawn(role, index)
        self._inbox = self._bind("tokenizer", ToTokenizer)
        self._supervisor = self._bind("supervisor", ToSupervisor)
        self.resolved = resolve_config(config)
        self._group.broadcast(Launch(self.resolved))
        self._core = TokenizerCore(
            self.resolved,
            0,
            to_engine=self._to_engine,
            to_frontend=self._from_core,
            run_later=run_later,
        )
        self._closing.callback(self._core.close)
        waiting: set[tuple[str, int]] = {ENGINE_READY, *children}
        while waiting:
            for message in self._inbox.receive(WATCH_MS):
                if isinstance(message, EngineReady):
                    self._core.handle(message)
                    waiting.discard(ENGINE_READY)
            waiting -= self._watch()

    def _bind(self, role: str, accepts: Any) -> Inbox:
        return Inbox(self._context, address(self._runtime.path, role), accepts)

    # -------------------------------------------------------------------------------- a run

    def _tokenize(
        self,
        requests: Iterator[tuple[int, Generate | Pool]],
        pending: Mapping[int, Pending],
        interrupt: "Interrupt",
    ) -> list[Submit]:
        """Return what is to be submitted for the next of *requests*: a full step's, or all of them.

        Raises for the first that is refused.
        """
        ordered = self.resolved.config.scheduler.policy == "priority"  # the first may be the last
        self._to_submit, begun, tokens = [], [], 0
        try:
            for index, request in requests:
                interrupt.check()
                begun.append(request.request_id)
                known = len(self._to_submit)
                self._core.handle(request)
                refusal = pending[request.request_id].answer
                if isinstance(refusal, Failed):
                    raise as_error(refusal, f"prompt {index}: ")
                tokens += sum(len(each.token_ids) // 4 for each in self._to_submit[known:])
                if tokens >= self.resolved.max_num_batched_tokens and not ordered:
                    break
            return self._to_submit
        except BaseException:
            for request_id in begun:  # of these the engine core has seen nothing
                self._core.handle(Cancel(request_id))
            raise
        finally:
            self._to_submit = None

    def _submit(self, submit: Submit) -> None:
        self._sequences.update(range(submit.seq_id, submit.seq_id + submit.n))
        self._group.send("engine", 0, submit)

    def _note(self, output: StepOutput) -> int:
        """Strike off the sequences that end in *output*; return how many tokens it holds."""
        finish = np.frombuffer(output.finish, np.uint8)
        if finish.any():
            ended = np.frombuffer(output.seq_ids, np.int64)[finish != RUNNING]
            self._sequences.difference_update(ended.tolist())
        self._sequences.difference_update(error.seq_id for error in output.errors)
        return int(np.count_nonzero(np.frombuffer(output.token_ids, np.int32) >= 0))

    def _abandon(self, pending: Mapping[int, Pending]) -> None:
        """Abort what still runs of a run's requests and wait for the last rows of its sequences."""
        if self._failure is not None:
            return
        for request_id, each in pending.items():
            if each.answer is None:
                self._core.handle(Cancel(request_id))
        if self._sequences:
            self._group.send("engine", 0, Abort(sorted(self._sequences)))
        deadline = time.monotonic() + ABORT_SECONDS
        while self._sequences and time.monotonic() < deadline:
            left = len(self._sequences)
            self.pump()
            stats = self.stats()
            if len(self._sequences) == left and not (stats.num_running or stats.num_waiting):
                self._sequences.clear()  # a second Ctrl-C came before their last rows were noted
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
                    self._tell(delta)
            case Failed() | Pooled():
                self._tell(message)
            case DetokenizedText():
                self._text = message.text

    def _tell(self, news: News) -> None:
        take = self._takers.get(news.request_id)
        if take is not None:
            take(news)

    # ------------------------------------------------------------------------- the children

    def _check(self) -> None:
        self._check_alive()
        self._watch()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._unusable()

    def _unusable(self) -> Internal:
        return Internal(f"this LLM cannot run: {self._failure}; start() brings it up again")

    def _receive(self, inbox: Inbox, timeout_ms: int) -> list[Any]:
        try:
            return inbox.receive(timeout_ms)
        except zmq.ZMQError:
            self._check_alive()  # a signal handler has shut it down meanwhile
            raise

    def _watch(self, wait_ms: int = 0) -> set[tuple[str, int]]:
        """Return those who said Ready since the last look; raise if a child has died.

        Waits up to *wait_ms* for a message.
        """
        self._watched_at = time.monotonic()
        ready = set()
        fatal: Fatal | None = None
        dead = self._group.poll()
        for message in self._receive(self._supervisor, LAST_WORDS_MS if dead else wait_ms):
            match message:
                case Fatal():
                    fatal = fatal or message
                case Ready():
                    ready.add((message.role, message.index))
                case Profiled():
                    self._profiled = message
                case Administered():
                    self._administered = message
        if fatal or dead:
            # Who is killed takes others along, whose own words are of a connection that was cut.
            dead += self._group.poll()
            cause = min(dead, key=lambda each: each.status, default=None)
            if fatal and (cause is None or cause.status >= 0):
                self._fail(f"{fatal.role} {fatal.index} failed: {fatal.text}")
            elif cause:
                self._fail(f"{cause.role} {cause.index} died: {cause.describe()}")
        return ready

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._group.kill()  # what is left has nothing worth to finish
        self.close()
        raise Internal(reason)


class Interrupt:
    """Whether Ctrl-C was pressed since a run began."""

    pressed = False

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was held back."""
        if self.pressed:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Hold the first Ctrl-C back to where the run looks for it; the second is raised at once.

    So an interrupt never strikes the tokenizer core in the middle of a change. Where this is not
    the main thread, or the program handles SIGINT itself, nothing is altered.
    """
    interrupt = Interrupt()
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


def as_error(failed: Failed, prefix: str = "") -> ZlmError:
    """Return the error that *failed* stands for, its message after *prefix*."""
    kinds: dict[bool, type[ZlmError]] = {True: Internal, False: BadRequest}
    kind = TooLong if failed.code == TooLong.code else kinds[failed.status >= 500]
    return kind(
        prefix + failed.message, param=failed.param, code=failed.code, type=failed.error_type
    )
