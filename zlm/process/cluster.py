"""The machines ("nodes") of one engine: their shared secret, and where each process listens.

Nodes talk over TCP with keys made from the secret (``zlm.ipc.curve``). On the head three ports that
follow one another are fixed: torch's rendezvous on --master-port, the supervisor, the engine core.
All other processes listen on ports that the system chooses, and tell them.

Child processes get the key of their incarnation, not the secret, in a file of the runtime
directory. Knows nothing of who starts what, and when.
"""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import zmq

from zlm import __version__
from zlm.config import ParallelOptions
from zlm.errors import ConfigError
from zlm.ipc.curve import Keys, derived, stretched

CHECKPOINT = "checkpoint"  # one of the facts that nodes must have alike: ``fingerprint``
VARIABLE = "ZLM_CLUSTER_KEY"  # environment of supervisors: the secret
LEAST_CHARACTERS = 16  # of a secret
NAME_SECONDS = 30.0  # how long the head's name may be unknown to itself
MAKE_KEY = "head -c 32 /dev/urandom | base64"
LOOPBACK = ("127.", "::1")  # what /etc/hosts often says of a machine's own name
SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface
IPV6_INTERFACES = Path("/proc/net/if_inet6")  # its lines: address in hexadecimal, ..., interface


def read_secret(parallel: ParallelOptions, environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key made from the secret that --cluster-key or $ZLM_CLUSTER_KEY gives.

    Raises ConfigError if there is none, or too short a one.
    """
    path, secret, where = parallel.cluster_key_file, environment.get(VARIABLE, ""), f"${VARIABLE}"
    if path is not None:
        where = f"--cluster-key {path}"
        try:
            secret = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {error}") from error
    secret = secret.strip()
    if not secret and path is None:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} needs a secret that all nodes share: --cluster-key FILE "
            f"or ${VARIABLE}. This makes one: {MAKE_KEY}"
        )
    if len(secret) < LEAST_CHARACTERS:
        raise ConfigError(
            f"{where}: a secret has at least {LEAST_CHARACTERS} characters, this one has "
            f"{len(secret)}. This makes one: {MAKE_KEY}"
        )
    return stretched(secret.encode())


def facts(parallel: ParallelOptions) -> dict[str, str]:
    """Return what all nodes must have alike, by what an error calls it; CHECKPOINT comes later."""
    names = ("nnodes", "tensor_parallel_size", "pipeline_parallel_size")
    flags = {f"--{name.replace('_', '-')}": str(getattr(parallel, name)) for name in names}
    return {"zlm": __version__, "torch": version("torch"), "device": parallel.device, **flags}


def head_address(parallel: ParallelOptions) -> str:
    """Return the IP address of --master-addr, an IPv4 one if it has any.

    Raises OSError if the name is not known (yet).
    """
    assert parallel.master_addr is not None, "checked with the flags"
    found = socket.getaddrinfo(parallel.master_addr, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def await_head_address(parallel: ParallelOptions) -> str:
    """Return the head's address, for the head: its own name may be published a little late.

    Raises ConfigError, naming the flag.
    """
    name, deadline = str(parallel.master_addr), time.monotonic() + NAME_SECONDS
    while True:
        try:
            address = head_address(parallel)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"--master-addr {name}: {error.strerror}") from error
        time.sleep(1.0)
    if address.startswith(LOOPBACK) and not name.startswith((*LOOPBACK, "localhost")):
        raise ConfigError(
            f"--master-addr {name} is {address} on this machine, where no other finds it: give the "
            "address that it has on the network of the nodes"
        )
    return address


def own_address(head: str) -> str:
    """Return this machine's address on the way to *head*. Raises OSError if there is no way."""
    family = socket.AF_INET6 if ":" in head else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((head, 9))  # sends nothing
        return str(probe.getsockname()[0])


def interface(address: str) -> str | None:
    """Return the name of the network interface that has *address*; None if none has."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        lines = (line.split() for line in IPV6_INTERFACES.read_text().splitlines())
        return next((line[-1] for line in lines if line[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def worker_environment(address: str) -> dict[str, str]:
    """Return what has the workers' libraries talk over the interface of *address*, unless the user
    has set another.
    """
    name = interface(address)
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    if ":" in address:
        wanted["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {variable: value for variable, value in wanted.items() if variable not in os.environ}


def endpoint(host: str, port: int | str) -> str:
    """Return ZeroMQ's address of *port* of *host*; ``*`` is a port that the system chooses."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def supervisor_at(host: str, parallel: ParallelOptions) -> str:
    """Return where the head's supervisor, on *host*, takes what other nodes tell."""
    return endpoint(host, parallel.master_port + 1)


def engine_at(host: str, parallel: ParallelOptions) -> str:
    """Return where the engine core, on *host*, takes what workers of other nodes tell."""
    return endpoint(host, parallel.master_port + 2)


def cannot_listen(at: str, error: zmq.ZMQError) -> ConfigError:
    """Return what is to be told if the address *at* of the head cannot be listened on."""
    reason = os.strerror(error.errno or 0)
    return ConfigError(
        f"cannot listen on {at.removeprefix('tcp://')}: {reason}. Node 0 must run where "
        "--master-addr is, and three ports from --master-port on must be free there"
    )


def supervisor_keys(key: bytes) -> Keys:
    """Return the key pair of supervisors among themselves; *key* is of ``read_secret``."""
    return Keys.of(derived(key, "supervisors"))


def engine_key(key: bytes, session: int, incarnation: int) -> bytes:
    """Return the key of an engine core and its workers, of one incarnation of one server."""
    return derived(key, "engine", session, incarnation)


def write_key(runtime: Path, incarnation: int, key: bytes) -> None:
    """Leave the key of an engine's *incarnation* to the processes of this machine."""
    _key_file(runtime, incarnation).write_bytes(key)


def read_keys(runtime: Path, incarnation: int) -> Keys:
    """Return the key pair of an engine's *incarnation*."""
    return Keys.of(_key_file(runtime, incarnation).read_bytes())


def meeting_name(runtime: Path, incarnation: int) -> str:
    """Return a name that only the processes of an engine's *incarnation* know, on all nodes."""
    return derived(_key_file(runtime, incarnation).read_bytes(), "meeting").hex()


def _key_file(runtime: Path, incarnation: int) -> Path:
    return runtime / f"key.{incarnation}"
