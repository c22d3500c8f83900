"""Two "machines" on one: network namespaces, joined by a pair of virtual Ethernet interfaces.

This needs root, and ``ip`` of the package iproute2. The thread that enters ``two_machines`` is on
the first machine until it leaves it, and so are the threads and processes it starts meanwhile.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import Server

CLONE_NEWNET = 0x40000000
ADDRESSES = ("10.211.77.1", "10.211.77.2")  # of the two on their network, seen by nobody else
IPV6_ADDRESSES = ("fd77::1", "fd77::2")  # on a second network, if there is one: ``add_ipv6``
FLAGS = [
    "--device", "cpu", "--cpu-threads", "1", "--served-model-name", "smol",
    "--max-model-len", "512", "--num-gpu-blocks-override", "200", "--max-num-batched-tokens", "48",
    "--max-num-seqs", "8",
]  # fmt: skip
SEVERAL = [
    "--nnodes", "2", "--master-addr", ADDRESSES[0], "--health-timeout", "5",
    "--startup-timeout", "60", "--max-restarts", "100",
]  # fmt: skip


class Machines:
    """The two of them."""

    def __init__(self) -> None:
        self.names = tuple(f"zlm{os.getpid()}{letter}" for letter in "ab")

    def make(self) -> None:
        """Make both and their link; pytest skips where that is not allowed."""
        if shutil.which("ip") is None:
            pytest.skip("there is no `ip` here: apt-get install iproute2")
        try:
            for name in self.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            self._connect("veth0", [f"{address}/24" for address in ADDRESSES])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")

    def add_ipv6(self) -> None:
        """Join them by a second link, of IPv6 alone; pytest skips where the system has none."""
        try:
            self._connect("veth6", [f"{address}/64" for address in IPV6_ADDRESSES])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no IPv6 here: {error.stderr.decode().strip()}")

    def _connect(self, link: str, addresses: list[str]) -> None:
        a, b = self.names
        _ip("link", "add", link, "netns", a, "type", "veth", "peer", link, "netns", b)
        for name, address in zip(self.names, addresses, strict=True):
            _ip("-n", name, "address", "add", address, "dev", link, "nodad")
            _ip("-n", name, "link", "set", link, "up")

    def remove(self) -> None:
        """Remove them; processes that are left there keep running without a link."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    @property
    def on_second(self) -> list[str]:
        """What stands before a command to run it on the second machine."""
        return ["ip", "netns", "exec", self.names[1]]

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", "veth0", "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", "veth0", "up")

    def pids(self, machine: int) -> dict[int, str]:
        """Return the processes of a machine with their command lines."""
        found = subprocess.check_output(["ip", "netns", "pids", self.names[machine]], text=True)
        commands = {}
        for pid in map(int, found.split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                commands[pid] = line.decode().replace("\0", " ")
        return commands

    def open_ports(self, machine: int) -> list[str]:
        """Return what listens on all interfaces of a machine."""
        net = Path(f"/proc/{self.workers(machine)[0]}/net")
        lines = [line for name in ("tcp", "tcp6") for line in (net / name).open()]
        rows = [line.split() for line in lines]
        listening = [row[1] for row in rows if row[3] == "0A"]
        assert listening, "the workers' own ports"
        return [at for at in listening if not at.rpartition(":")[0].strip("0")]

    def workers(self, machine: int) -> list[int]:
        return [pid for pid, line in self.pids(machine).items() if "zlm.worker.process" in line]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """Make two machines and be on the first of them meanwhile."""
    machines = Machines()
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        machines.make()
        with Path(f"/run/netns/{machines.names[0]}").open("rb") as first:
            _enter(first.fileno())
        yield machines
    finally:
        _enter(own)
        os.close(own)
        machines.remove()


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class NodeProcess:
    """``zlm serve`` of a node other than the head, under test, on the second machine."""

    def __init__(self, machines: Machines, model: Path, log: Path, flags: list[str]) -> None:
        self.log = log
        program = [str(Path(sys.executable).with_name("zlm")), "serve", str(model)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*machines.on_second, *program, *flags], stdout=out, stderr=subprocess.STDOUT
            )

    def end(self, seconds: float = 30.0) -> tuple[int, str]:
        """Wait for its end; return the exit status and the last line of its log."""
        status = self.process.wait(seconds)
        return status, self.log.read_text().splitlines()[-1]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Pair:
    """A head on the first machine and a node on the second, which serve together."""

    def __init__(
        self,
        machines: Machines,
        model: Path,
        folder: Path,
        layout: list[str],
        node_model: Path | None = None,
    ) -> None:
        """Start both; *layout* are the flags that share the model out."""
        self.machines = machines
        self._model, self._folder = node_model or model, folder
        self.flags = [*FLAGS, *SEVERAL, *layout]
        self._nodes: list[NodeProcess] = []
        self.node = self.add_node()  # it waits for the head
        self.head = Server(model, folder / "head", self.flags)

    def add_node(self) -> NodeProcess:
        """Start a node on the second machine."""
        log = self._folder / f"node-{len(self._nodes)}"
        words = ["--dtype", "float32", *self.flags, "--node-rank", "1", "--headless"]
        self._nodes.append(NodeProcess(self.machines, self._model, log, words))
        return self._nodes[-1]

    def stop(self) -> None:
        self.head.stop()
        for node in self._nodes:
            node.stop()
