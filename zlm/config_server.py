"""The server's part of the configuration: HTTP, keys, and what a client may ask and take.

Part of ``zlm.config``, from where everybody takes it. Imports the errors and value types alone.
"""

from typing import Literal

import msgspec

from zlm.api_keys import ApiKey
from zlm.errors import ConfigError, clip
from zlm.sampling_params import MAX_LOGPROBS, SamplingLimits


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may send, and how long it may take."""

    max_body_bytes: int = 32 * 1024 * 1024
    max_body_memory_bytes: int = 1024**3  # of all bodies that are arriving at a front end
    max_header_bytes: int = 64 * 1024
    max_header_count: int = 128
    body_timeout_seconds: float = 30.0  # to send headers and body
    keep_alive_seconds: float = 75.0  # an idle connection is closed after this
    max_prompts: int = 1024  # prompts in one completion request
    max_concurrent_requests: int = 4096  # open requests a front end holds before 503
    template_seconds: float = 5.0  # to render a chat template
    grammar_seconds: float = 5.0  # to compile a grammar
    request_timeout_seconds: float | None = None  # to answer a request; None: no limit
    max_connections: int = 16384  # open connections of a front end; more are closed at once
    sampling: SamplingLimits = SamplingLimits()


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # path of a Unix socket to listen on instead of host and port
    api_keys: tuple[ApiKey, ...] = ()  # none here and in the file: no key is asked for
    admin_api_keys: tuple[ApiKey, ...] = ()  # none: nobody may use the routes of administration
    api_key_file: str | None = None  # its keys come besides; read again when it has changed
    ssl_keyfile: str | None = None  # the certificate's private key; None: in the same file
    ssl_certfile: str | None = None  # certificate chain (PEM); None: no TLS
    ssl_ca_certs: str | None = None  # whose certificates clients must show, see ssl_cert_reqs
    ssl_cert_reqs: Literal["none", "optional", "required"] = "none"  # of clients
    ssl_ciphers: str | None = None  # OpenSSL's list, for TLS 1.2; None: OpenSSL's default
    open_metrics: bool = False  # serve /metrics without a key
    api_server_count: int | None = None  # front-end processes; None: by device and CPUs
    tokenizer_pool_size: int | None = None  # tokenizer processes; None: by device and CPUs
    unknown_fields: Literal["reject", "ignore"] = "reject"  # unknown keys in a request body
    clamp_max_tokens: bool = False  # clamp max_tokens to the room left rather than refuse
    allow_special_tokens_in_content: bool = False  # control tokens typed by users are honoured
    trust_request_chat_template: bool = False  # requests may bring a chat template of their own
    tool_call_parser: str | None = None  # format of tool calls; None: what the template shows
    reasoning_parser: str | None = None  # format of reasoning; None: what the template shows
    allowed_origins: tuple[str, ...] = ("*",)  # CORS
    ui: bool = True  # serve the web page at /
    root_path: str = ""  # prefix a reverse proxy strips or keeps
    shutdown_timeout_seconds: float = 30.0  # running requests may finish for so long on SIGTERM
    health_timeout_seconds: float = 10.0  # without progress until /health says so
    hang_timeout_seconds: float = 60.0  # without progress until a process is replaced
    startup_timeout_seconds: float = 600.0  # the same for one that loads
    max_restarts: int = 5  # of a process in 10 minutes, or in a row, until the server gives up
    log_requests: bool = True  # one log line a request
    limits: ServerLimits = ServerLimits()

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients must show a key."""
        return bool(self.api_keys) or self.api_key_file is not None


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of the work, and how."""

    format: Literal["text", "json"] = "text"  # of log lines, in every process
    stats: bool = True  # a line every now and then on how the engine is doing
    traces_endpoint: str | None = None  # OTLP/HTTP: where a span a request is sent; None: nowhere


def check_server(server: ServerOptions) -> None:
    """Raise ConfigError, naming the flag and the limit, if a value is wrong."""
    limits = server.limits
    within("--port", server.port, 0, 65535)
    within("--api-server-count", server.api_server_count, 1, 64)
    within("--tokenizer-pool-size", server.tokenizer_pool_size, 1, 64)
    within("--shutdown-timeout", server.shutdown_timeout_seconds, 0, 86400)
    within("--health-timeout", server.health_timeout_seconds, 2, 86400)
    within("--hang-timeout", server.hang_timeout_seconds, 2, 86400)
    within("--startup-timeout", server.startup_timeout_seconds, 2, 86400)
    within("--max-restarts", server.max_restarts, 0, 1000)
    within("--max-body-bytes", limits.max_body_bytes, 1, 2**40)
    within("--max-body-memory", limits.max_body_memory_bytes, limits.max_body_bytes, 2**50)
    within("--max-header-bytes", limits.max_header_bytes, 256, 2**30)
    within("--max-header-count", limits.max_header_count, 1, 2**20)
    within("--body-timeout", limits.body_timeout_seconds, 0.001, 86400)
    within("--keep-alive-timeout", limits.keep_alive_seconds, 0.001, 86400)
    within("--max-prompts", limits.max_prompts, 1, 2**20)
    within("--max-concurrent-requests", limits.max_concurrent_requests, 1, 2**20)
    within("--template-timeout", limits.template_seconds, 0.001, 86400)
    within("--grammar-timeout", limits.grammar_seconds, 0.001, 86400)
    within("--request-timeout", limits.request_timeout_seconds, 0.001, 86400)
    within("--max-connections", limits.max_connections, 1, 2**20)
    _check_sampling(limits.sampling)
    _check_tls(server)
    _check_texts(server)


def _check_texts(server: ServerOptions) -> None:
    root = server.root_path
    if root and not root.startswith("/"):
        raise ConfigError(f"--root-path must start with /, got {clip(root)}")


def _check_sampling(limits: SamplingLimits) -> None:
    within("--max-n", limits.max_n, 1, 2**14)
    within("--max-stop-strings", limits.max_stop_strings, 0, 2**14)
    within("--max-stop-length", limits.max_stop_characters, 1, 2**20)
    within("--max-logit-bias", limits.max_logit_bias, 0, 2**20)
    within("--max-bad-words", limits.max_bad_words, 0, 2**14)
    within("--max-logprobs", limits.max_logprobs, 0, MAX_LOGPROBS)


def _check_tls(server: ServerOptions) -> None:
    if server.ssl_certfile is None:
        others = ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers")
        for name in others:
            if getattr(server, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs --ssl-certfile, the server's certificate")
    if server.ssl_cert_reqs != "none" and server.ssl_ca_certs is None:
        raise ConfigError(
            f"--ssl-cert-reqs {server.ssl_cert_reqs} needs --ssl-ca-certs: whose certificates "
            "clients may show"
        )


def within(flag: str, value: float | None, low: float, high: float) -> None:
    """Raise ConfigError unless *value* is None or in the range."""
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{flag} must be between {low} and {high}, got {value}")


def among(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError unless *value* is one of *known*."""
    if value not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(known)}, got {clip(value)}")
