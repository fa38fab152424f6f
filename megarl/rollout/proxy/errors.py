"""What a client is told when its request cannot be served."""

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
"""By HTTP status; anything else is an `api_error`. OpenAI and Anthropic share these names."""


class ProxyError(Exception):
    """An answer other than 200.

    Args:
      status: of HTTP.
      message: for the one who wrote the agent. Never holds a key.
      code: for programs, as OpenAI names it.
      param: the field of the request that is wrong.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "api_error")

    def for_openai(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def for_anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


def bad_request(param: str, message: str) -> ProxyError:
    """400 that names the field."""
    return ProxyError(400, f"{param}: {message}", param=param)
