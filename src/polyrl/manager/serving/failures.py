"""What goes wrong for whoever asks, in the shape that OpenAI's clients read."""

from typing import Literal

from msgspec import Struct

from polyrl.errors import RequestError

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "api_error",
]
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_SERVER_ERROR = 500


class ErrorBody(Struct, frozen=True, kw_only=True):
    message: str
    type: ErrorType
    param: str | None = None
    """Which field is wrong, if one is."""
    code: str | None = None


class AskErrorReply(Struct, frozen=True, kw_only=True):
    error: ErrorBody


class AskError(RequestError):
    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def reply(self) -> AskErrorReply:
        return error_reply(self.status, str(self), param=self.param, code=self.code)


def error_reply(status: int, message: str, *, param: str | None = None, code: str | None = None) -> AskErrorReply:
    kind = _TYPES.get(status, "api_error" if status >= _SERVER_ERROR else "invalid_request_error")
    return AskErrorReply(error=ErrorBody(message=message, type=kind, param=param, code=code))


def wrong(param: str, message: str, *, code: str | None = None) -> AskError:
    """A field is not what it should be."""
    return AskError(400, f"{param}: {message}", param=param, code=code)
