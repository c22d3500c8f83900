"""The error tree: every error that can reach a client knows its HTTP status and OpenAI body.

Imports nothing of zlm. A handler never has to guess: it catches ``ZlmError`` and writes
``error.status`` and ``error.body()``; anything else that is raised is a fault of ours and becomes
``Internal``.
"""

from typing import Any

MAX_ECHO_CHARACTERS = 200  # how much of a client's own data an error message may repeat


def clip(value: object) -> str:
    """Return *value* as text, cut to what an error message may echo of client data."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= MAX_ECHO_CHARACTERS:
        return text
    return text[:MAX_ECHO_CHARACTERS] + "..."


class ZlmError(Exception):
    """An error with an HTTP status, an OpenAI error type, and optionally a code and a field."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        type: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status
        if type is not None:
            self.type = type

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error body, ready for JSON."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class BadRequest(ZlmError, ValueError):
    """The request is malformed or a value is out of range; ``param`` names the field.

    Offline callers may catch it as the ValueError it is.
    """

    status = 400
    type = "invalid_request_error"


class TooLong(BadRequest):
    """The prompt, or prompt plus requested output, exceeds the context length or the KV cache."""

    code = "context_length_exceeded"


class Unauthorized(ZlmError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ZlmError):
    """The key is good, but does not open this route."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(ZlmError):
    """No such path or no such model."""

    status = 404
    type = "invalid_request_error"


class MethodNotAllowed(ZlmError):
    """The path exists, the method does not; the answer's Allow header lists ``allow``."""

    status = 405
    type = "invalid_request_error"

    def __init__(self, message: str, *, allow: tuple[str, ...] = (), **keywords: Any) -> None:
        super().__init__(message, **keywords)
        self.allow = allow


class RequestTimeout(ZlmError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"


class BodyTooLarge(ZlmError):
    """The body is larger than the server takes."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMediaType(ZlmError):
    """The body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"


class QuotaExceeded(ZlmError):
    """The API key has used up what it may; ``retry_after_seconds`` says when it may go on."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class HeadersTooLarge(ZlmError):
    """The request line and headers exceed their limits."""

    status = 431
    type = "invalid_request_error"


class Overloaded(ZlmError):
    """Not ready, overloaded or draining; the client may try again."""

    status = 503
    type = "overloaded_error"

    def __init__(self, message: str, **keywords: Any) -> None:
        keywords.setdefault("retry_after_seconds", 1)
        super().__init__(message, **keywords)


class Aborted(ZlmError):
    """An administrator has ended the request; the client is told not to send it again by itself."""

    status = 503
    type = "aborted_error"
    code = "request_aborted"


class DeadlineExceeded(ZlmError):
    """The answer was not there within the time that the client or the server allows."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class Internal(ZlmError):
    """A fault of ours."""


class ModelError(ZlmError):
    """The checkpoint cannot be served: missing tensors, unknown architecture, damaged file."""

    type = "model_error"


class ConfigError(ZlmError, ValueError):
    """A flag, a config file or the environment is wrong; raised before anything is served.

    Offline callers may catch it as the ValueError it is.
    """

    type = "config_error"
