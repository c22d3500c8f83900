"""Kernels compiled side by side, in processes without a GPU: ``python -m zlm.worker.kernel_farm``.

A kernel takes a second, one start on a fresh machine needs dozens, and most of a compilation holds
Python's lock: so they are compiled by processes, into the cache that all share, where the worker
then finds them. One process imports what they need and forks into all of them. Each has a socket,
from which it reads variants, a JSON line each; it answers each with a line, and ends with its
input: with the worker, whatever ends that.

What cannot be compiled so is only told: the worker compiles it when it launches it, and if that
fails its error is the true one.

Imports neither torch nor Triton before a process needs them: ``start_early`` is called while the
worker still imports torch, which its processes have to do as well.
"""

import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from zlm.config import Resolved
from zlm.process import garbage
from zlm.worker import kernel_cache

if TYPE_CHECKING:
    from zlm.worker.kernel_variants import Target, Variant

log = logging.getLogger("zlm.worker")

MOST_PROCESSES = 32  # each takes a tenth of a gigabyte of its own
WORTH_IT = 4  # fewer variants are compiled sooner than a process has started
COMPILER = "triton.compiler.code_generator"  # imported by Triton when it first compiles
REPORT_SECONDS = 5.0  # between two reports of how many are left
CLOSE_SECONDS = 10.0  # how long a process may take to end, idle as it is


class Farm:
    """Owns the compiling processes. They start when it is made, and end with it."""

    def __init__(self, num_processes: int | None = None) -> None:
        """Start *num_processes*; None: one a CPU that this process may use, ``MOST_PROCESSES``."""
        if num_processes is None:
            num_processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._waiting: deque[tuple[Variant, Target, bool]] = deque()
        self._launchers: set[str] = set()  # of what was added: each is compiled once
        self._failures: dict[Variant, str] = {}
        self._added, self._there, self._no_more = 0, threading.Condition(), False
        self._threads: list[threading.Thread] = []
        pairs = [socket.socketpair() for _ in range(num_processes)]
        self._sockets = [ours for ours, _ in pairs]
        theirs = [their.fileno() for _, their in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zlm.worker.kernel_farm", *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=environment,
            pass_fds=theirs,
            process_group=0,
        )
        for _, their in pairs:
            their.close()

    def add(self, variant: "Variant", target: "Target") -> None:
        """Have *variant* compiled for *target* into the cache, meanwhile."""
        if not self._threads:
            self._no_more = False
            self._threads = [
                threading.Thread(target=self._feed, args=(each,), daemon=True)
                for each in self._sockets
            ]
            for thread in self._threads:
                thread.start()
        with self._there:
            launches = variant.launcher not in self._launchers
            self._launchers.add(variant.launcher)
            self._waiting.append((variant, target, launches))
            self._added += 1
            self._there.notify()

    def finish(self, say: Callable[[str], None] | None = None) -> dict["Variant", str]:
        """Wait until all that was added is compiled; return what failed, and why.

        *say* is told now and then how many there are left.
        """
        with self._there:
            self._no_more = True
            self._there.notify_all()
        added, told = self._added, self._added
        for thread in self._threads:
            thread.join(REPORT_SECONDS)
            while thread.is_alive():
                if say is not None and len(self._waiting) < told:
                    told = len(self._waiting)
                    say(f"compiling kernels: {told} of {added} left")
                thread.join(REPORT_SECONDS)
        failures, self._failures = self._failures, {}
        self._threads, self._added = [], 0
        return failures

    def compile(
        self,
        variants: Sequence["Variant"],
        target: "Target",
        say: Callable[[str], None] | None = None,
    ) -> dict["Variant", str]:
        """Compile *variants* for *target* into the cache; see ``finish``."""
        for variant in variants:
            self.add(variant, target)
        return self.finish(say)

    def _feed(self, process: socket.socket) -> None:
        """Give the *process* of a socket one variant after another, until there are no more."""
        while True:
            with self._there:
                while not self._waiting and not self._no_more:
                    self._there.wait()
                if not self._waiting:
                    return
                variant, target, launches = self._waiting.popleft()
            error = _ask(process, variant, target, launches)
            if error:
                self._failures[variant] = error

    def close(self) -> None:
        """End the processes, and what waits for them."""
        self._waiting.clear()
        with self._there:
            self._no_more = True
            self._there.notify_all()
        for each in self._sockets:
            with contextlib.suppress(OSError):  # it has died: there is nobody to tell
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        try:
            # One that nothing was asked of may still be importing, and hears nothing until then.
            self._process.wait(CLOSE_SECONDS if self._launchers else 0.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> "Farm":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_early(resolved: Resolved, rank: int) -> Farm | None:
    """Begin what kernels of the worker *rank* need, before Triton is imported: on a GPU alone.

    Return a farm if it may have kernels to compile: as the first worker of its machine, unless a
    start like this one has found all of them.
    """
    if resolved.device != "cuda" or resolved.spec.pooling is not None:
        return None
    folder = kernel_cache.prepare()
    is_first = rank % resolved.config.parallel.workers_per_node == 0
    is_warm = kernel_cache.WarmMark(folder, kernel_cache.facts_of(resolved, rank)).is_set()
    farm = Farm() if is_first and not is_warm else None
    kernel_cache.hash_triton()
    return farm


def compile_all(variants: Sequence["Variant"], say: Callable[[str], None] | None = None) -> None:
    """Compile *variants* into the cache, for the GPU of this process.

    *say* is told now and then how many there are left.
    """
    if len(variants) < WORTH_IT:
        return
    from zlm.worker.kernel_variants import current_target

    began = time.perf_counter()
    with Farm() as farm:
        failures = farm.compile(variants, current_target(), say)
    tell(len(variants), failures, time.perf_counter() - began)


def tell(count: int, failures: dict["Variant", str], seconds: float) -> None:
    """Log what became of *count* variants, and in how many *seconds*."""
    for variant, error in failures.items():
        log.warning("%s was not compiled ahead: %s", variant.name, error)
    log.info("compiled %d kernels in %.1f s", count - len(failures), seconds)


def _ask(process: socket.socket, variant: "Variant", target: "Target", launches: bool) -> str:
    """Have *process* compile *variant*; return what went wrong, or an empty string."""
    line = json.dumps({"target": target, "launches": launches, **asdict(variant)}) + "\n"
    try:
        process.sendall(line.encode())
        with process.makefile(encoding="utf-8") as answers:
            answer = answers.readline()
    except OSError as error:
        return f"the compiling process has died ({error})"
    return str(json.loads(answer)) if answer else "the compiling process has died"


def serve(requests: TextIO, answers: TextIO) -> None:
    """Compile what comes in lines of *requests*; answer each with "" or an error, as JSON."""
    from zlm.worker.kernel_variants import Variant, compile_variant, use_target

    known: Target | None = None
    for line in requests:
        request = json.loads(line)
        target: Target = tuple(request.pop("target"))
        launches = request.pop("launches")
        error = ""
        try:
            if target != known:
                use_target(target)
                known = target
            compile_variant(Variant(**request), launches=launches)
        except Exception as failure:  # whatever it is, the worker will meet it itself
            error = f"{type(failure).__name__}: {failure}"
        answers.write(json.dumps(error) + "\n")
        answers.flush()


def main(sockets: Sequence[int]) -> None:
    """Serve each of *sockets*, descriptors, in a process of its own; end when they have ended."""
    garbage.pause()
    hashing = kernel_cache.hash_kernels()
    for module in ("zlm.worker.kernel_variants", COMPILER):
        importlib.import_module(module)  # which each of the processes would do
    hashing.join()
    garbage.resume()
    children = []
    for own in sockets:
        if not (child := os.fork()):
            for other in sockets:
                if other != own:
                    os.close(other)
            with (
                contextlib.suppress(BrokenPipeError, ConnectionResetError),  # the worker has gone
                open(own, closefd=False) as requests,
                open(own, "w", closefd=False) as answers,
            ):
                serve(requests, answers)
            os._exit(0)  # what is loaded need not be taken apart: the worker waits for the end
        children.append(child)
    for own in sockets:
        os.close(own)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
