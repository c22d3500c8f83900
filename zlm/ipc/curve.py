"""Keys of the sockets between machines: CurveZMQ with key pairs made from one shared secret.

Whoever knows the secret makes the same pair. A listener has its secret half; who connects must know
the public half, since the first message it sends is sealed to it, and the listener opens none that
is not. That half is never sent and cannot be guessed without the secret, so knowing it is what
tells a peer from a stranger; the listener's answer shows that it has the secret half. What is sent
is encrypted and authenticated, by keys made anew for each connection.

Each purpose has a pair of its own, by ``derived``, and so has each incarnation of an engine:
nothing of a former one that is still under way in a network can reach the present one.
"""

import hashlib
from dataclasses import dataclass

import zmq
from zmq.utils import z85

KEY_BYTES = 32
_SCRYPT = {"n": 2**14, "r": 8, "p": 1}  # 0.1 s: guessing a secret that people thought up is slow


def stretched(secret: bytes) -> bytes:
    """Return the key of KEY_BYTES bytes that *secret*, of any length, stands for."""
    return hashlib.scrypt(secret, salt=b"zlm cluster key", dklen=KEY_BYTES, **_SCRYPT)


def derived(key: bytes, *purpose: object) -> bytes:
    """Return the key for one *purpose*, which tells nothing of *key* or of any other."""
    words = "\0".join(map(str, purpose)).encode()
    return hashlib.blake2b(words, key=key, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Keys:
    """One key pair, Z85-encoded."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, key: bytes) -> "Keys":
        """Return the pair whose secret half is *key*."""
        secret = z85.encode(key)
        return cls(zmq.curve_public(secret), secret)

    def listens(self, socket: zmq.Socket) -> None:
        """Let only those with this pair connect to where *socket* is bound from here on."""
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def connects(self, socket: zmq.Socket) -> None:
        """Have *socket* connect only to listeners with this pair."""
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
