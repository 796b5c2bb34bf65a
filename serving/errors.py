"""Errors in the shape of the OpenAI API: one class, and translations of what FastAPI raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serving import not_yet

_TYPES = {429: "rate_limit_error"}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    429: "queue_full",
    500: "internal_error",
    503: "unavailable",
}
_LONGEST = 500  # characters of a message: it may name what the client sent


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: of HTTP.
        message: for people; names the field and what would fit.
        param: the field, if it is one field's fault.
        code: for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES.get(status, "invalid_value")
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": _clean(self.message),
                "type": _TYPES.get(self.status, kind),
                "param": None if self.param is None else _clean(self.param),
                "code": self.code,
            }
        }


def of_validation(errors: Sequence[Any]) -> ApiError:
    """The 400 for a body that does not fit its model.

    Args:
        errors: pydantic's, of which the first is reported.
    """
    first = errors[0]
    kind, where = first["type"], first["loc"][1:]  # loc starts with "body"
    if kind == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if not where:
        wanted = "expected a JSON object, with Content-Type: application/json"
        return ApiError(400, f"the body: {wanted}", code="invalid_json")
    field = _path(where)
    if kind == "missing":
        return ApiError(
            400, f"{field}: required, but missing", param=field, code="missing_required_parameter"
        )
    if kind == "extra_forbidden" and where[-1] in not_yet.NAMES:
        message = f"{field}: not supported yet"
        return ApiError(400, message, param=field, code="unsupported_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, f"{field}: unknown field", param=field, code="unknown_parameter")
    message = "expected an object" if kind.startswith("model_") else first["msg"]
    return ApiError(400, f"{field}: {message}", param=field)


def of_http(status: int, detail: str, path: str) -> ApiError:
    """The answer where no route took the request, or the framework refused it."""
    if status == 404:
        detail = f"{path}: no such path"
    return ApiError(status, detail)


def _path(where: Sequence[str | int]) -> str:
    """`messages[0].content`, from the parts of a location."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return "".join(parts).removeprefix(".")


def _clean(text: str) -> str:
    """Text that can be sent: short, and without lone surrogates, which JSON lets a client write."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return text.encode("utf-8", errors="replace").decode("utf-8")
