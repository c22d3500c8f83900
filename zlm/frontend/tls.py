"""TLS: the certificate that a front end shows, and whose certificates it asks for.

Files are named in the environment, because a front end accepts connections before it is launched.
A certificate that has been renewed is taken in without a restart: connections that come after it
see the new one. Owns the context of one process's connections. Knows nothing of sockets.
"""

import logging
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from zlm.config import ServerOptions
from zlm.errors import BadRequest, ConfigError

ENVIRONMENT = "ZLM_TLS"  # of front ends: TlsFiles as JSON
MAX_PEM_BYTES = 1 << 20  # of a file, in which a certificate or key is looked for
HANDSHAKE_SECONDS = 10.0  # for a client to get through it
PLAIN_BODY = msgspec.json.encode(BadRequest("this port speaks HTTPS").body())
PLAIN_ANSWER = (  # to HTTP where TLS is spoken
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%b" % (len(PLAIN_BODY), PLAIN_BODY)
)
SHUTDOWN_SECONDS = 2.0  # for a client to say goodbye
_VERIFY = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}

logger = logging.getLogger(__name__)


class TlsFiles(msgspec.Struct, frozen=True):
    """The flags of the same names."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: str = "none"
    ciphers: str | None = None


def tls_files(options: ServerOptions) -> TlsFiles | None:
    """Return what *options* say; None: no TLS."""
    if options.ssl_certfile is None:
        return None
    return TlsFiles(
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        ca_certs=options.ssl_ca_certs,
        cert_reqs=options.ssl_cert_reqs,
        ciphers=options.ssl_ciphers,
    )


def environment(options: ServerOptions) -> dict[str, str]:
    """Return what front ends must find in their environment."""
    files = tls_files(options)
    return {} if files is None else {ENVIRONMENT: msgspec.json.encode(files).decode()}


class _Connection(ssl.SSLObject):
    """One connection's TLS, which answers who speaks HTTP instead, rather than hang up on him."""

    outgoing: ssl.MemoryBIO
    _is_plain = False

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST" or self._is_plain:
                raise
            self._is_plain = True
            self.outgoing.write(PLAIN_ANSWER)
            logger.warning("a client speaks HTTP to this port, which speaks HTTPS")
            raise ssl.SSLWantReadError("a plain answer waits") from None


class _Context(ssl.SSLContext):
    """Makes connections of the kind above."""

    sslobject_class = _Connection

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _Connection)
        made.outgoing = outgoing
        return made


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that shows the certificate; raises ConfigError, naming the flag."""
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    _load(context, files)
    context.verify_mode = _VERIFY[files.cert_reqs]
    try:
        if files.ca_certs is not None:
            context.load_verify_locations(files.ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-ca-certs {files.ca_certs}: {_reason(error)}") from None
    try:
        if files.ciphers is not None:
            context.set_ciphers(files.ciphers)
    except ssl.SSLError as error:
        raise ConfigError(f"--ssl-ciphers {files.ciphers}: {_reason(error)}") from None
    return context


class Certificates:
    """The context of this process's connections, kept up to date with its files."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._state = _state(files)
        self.context = server_context(files)

    @classmethod
    def from_environment(cls, given: Mapping[str, str] = os.environ) -> "Certificates | None":
        """Return those that the supervisor has named; None: no TLS."""
        if ENVIRONMENT not in given:
            return None
        return cls(msgspec.json.decode(given[ENVIRONMENT], type=TlsFiles))

    def refresh(self) -> None:
        """Read the certificate and its key again if they have changed.

        A pair that does not fit together, as between the writing of two files, changes nothing.
        """
        state = _state(self._files)
        if state == self._state:
            return
        self._state = state
        try:
            server_context(self._files)  # tried on another one: a half-loaded context is useless
            _load(self.context, self._files)
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error.message)
        else:
            logger.info("--ssl-certfile %s is read again", self._files.certfile)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    certfile, keyfile = f"--ssl-certfile {files.certfile}", f"--ssl-keyfile {files.keyfile}"
    _look_for("CERTIFICATE", files.certfile, certfile)
    if files.keyfile is None:
        _look_for("PRIVATE KEY", files.certfile, certfile, ": give --ssl-keyfile")
    else:
        _look_for("PRIVATE KEY", files.keyfile, keyfile)
        certfile = f"{certfile} {keyfile}"
    try:
        context.load_cert_chain(files.certfile, files.keyfile, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        reason = _reason(error)
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            reason = "the key is not the certificate's"
        raise ConfigError(f"{certfile}: {reason}") from None


def _look_for(what: str, path: str, flag: str, remedy: str = "") -> None:
    """Raise ConfigError if the file has no block of this kind, which OpenSSL tells less clearly."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_PEM_BYTES)
    except OSError as error:
        raise ConfigError(f"{flag}: {_reason(error)}") from None
    if f"{what}-----".encode() not in content:
        raise ConfigError(f"{flag}: there is no {what.lower()} in it{remedy}")


def _no_password() -> NoReturn:
    raise ConfigError("--ssl-keyfile: the key has a password; nobody is there to type it")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):  # some of them have neither number nor reason
        reason = getattr(error, "reason", None) or str(error)
        return reason.replace("_", " ").lower()
    return error.strerror or "unreadable"


def _state(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    """Return what tells one version of the files from the next."""
    facts = []
    for path in (files.certfile, files.keyfile, files.ca_certs):
        try:
            found = Path(path or files.certfile).stat()
            facts.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            facts.append((0, 0, 0))
    return tuple(facts)
