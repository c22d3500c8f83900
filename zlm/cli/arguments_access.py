"""The flags of serve that say who may use it, and over what: a group of ``arguments``."""

from zlm.api_keys import ApiKey, api_key, read_key_file
from zlm.cli import values
from zlm.cli.argument import Argument

CERT_REQS = ("none", "optional", "required")  # 0, 1 and 2 in Python's ssl and in vLLM
SECRET = ("server.api_keys", "server.admin_api_keys")  # fields whose values are never shown


def _admin_key(value: str) -> ApiKey:
    return api_key(value, admin=True, flag="--admin-api-key")


def _key_file(value: str) -> str:
    """Return the path of a key file that can be read; ConfigError says what is wrong in it."""
    read_key_file(value)
    return values.path(value)


ACCESS = (
    Argument(
        flag="--api-key",
        field="server.api_keys",
        metavar="KEY",
        parse=api_key,
        takes="repeats",
        help="key that clients must show; several times if need be. Better in $ZLM_API_KEY or a "
        "file, which ps never shows",
        default="none is asked for",
    ),
    Argument(
        flag="--api-key-file",
        field="server.api_key_file",
        metavar="FILE",
        parse=_key_file,
        help="a key a line, or JSON: {key or sha256, name, requests_per_minute, tokens_per_minute, "
        "concurrency, admin}; # starts a comment; read again when it changes",
        default="none",
    ),
    Argument(
        flag="--admin-api-key",
        field="server.admin_api_keys",
        metavar="KEY",
        parse=_admin_key,
        takes="repeats",
        help="key that also opens the routes of administration; also $ZLM_ADMIN_API_KEY",
        default="nobody may use them",
    ),
    Argument(
        flag="--open-metrics",
        field="server.open_metrics",
        help="serve /metrics without a key",
    ),
    Argument(
        flag="--ui",
        field="server.ui",
        help="serve a web page at /: a chat, and a dashboard of the server; it needs no key, what "
        "it shows does",
    ),
    Argument(
        flag="--allowed-origins",
        field="server.allowed_origins",
        metavar="ORIGIN",
        parse=values.strings,
        takes="repeats",
        help="origins that browsers may call from (CORS); several times, or a JSON list",
    ),
    Argument(
        flag="--ssl-certfile",
        field="server.ssl_certfile",
        metavar="FILE",
        parse=values.file,
        help="serve HTTPS with this certificate chain (PEM); read again when it changes",
        default="HTTP",
    ),
    Argument(
        flag="--ssl-keyfile",
        field="server.ssl_keyfile",
        metavar="FILE",
        parse=values.file,
        help="the certificate's private key (PEM, without a password)",
        default="in the same file",
    ),
    Argument(
        flag="--ssl-ca-certs",
        field="server.ssl_ca_certs",
        metavar="FILE",
        parse=values.file,
        help="certificates of those who sign clients' certificates (PEM)",
        default="none",
    ),
    Argument(
        flag="--ssl-cert-reqs",
        field="server.ssl_cert_reqs",
        metavar="HOW",
        parse=values.choice(*CERT_REQS, spellings=dict(zip("012", CERT_REQS, strict=True))),
        help="whether clients must show a certificate: none, optional or required",
    ),
    Argument(
        flag="--ssl-ciphers",
        field="server.ssl_ciphers",
        metavar="LIST",
        parse=values.text,
        help="ciphers of TLS 1.2, in OpenSSL's words",
        default="OpenSSL's",
    ),
)
