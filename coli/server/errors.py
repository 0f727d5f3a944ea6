"""One error, in the shape of either API.

Every refusal is an `ApiError`: the status, a sentence, and OpenAI's type, param and code. `ApiError.of` makes one of
any exception: coli's own (a user's mistake is 400, an overlong prompt 400 `context_length_exceeded`, the rest 500), the
scheduler's (busy 429, draining or waited too long 503, each with Retry-After), pydantic's and Starlette's. What is
unexpected is a 500 that says nothing of the fault; the traceback is the server's to say.
Routes under /v1/messages speak Anthropic's shape, all others OpenAI's (`body`).
Invariant: a mistake of the client is never a 5xx, for routers take that as a dead server.
Guarded by tests/server/test_errors.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from coli.errors import ColiError, PromptTooLong, UsageError
from coli.server.job import Busy, Cancelled, Draining, QueueTimeout

INVALID = "invalid_request_error"
TYPES = {429: "rate_limit_error"}  # of OpenAI, by status; other 4xx are INVALID, 5xx "server_error"
ANTHROPIC_TYPES = {
    400: INVALID, 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip
DRAIN_RETRY_S = 5  # a restart is expected after a drain
Model = TypeVar("Model", bound=BaseModel)


class ApiError(Exception):
    """A refusal with its status; `param` is the request's field, `code` a word that programs read."""

    def __init__(self, status: int, message: str, type: str | None = None, param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None) -> None:  # fmt: skip
        super().__init__(message)
        default = TYPES.get(status, INVALID if status < 500 else "server_error")
        self.status, self.message, self.type = status, message, type or default
        self.param, self.code, self.headers = param, code, dict(headers or {})

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """The refusal that `error` is to a client; 500 without details for what nobody foresaw."""
        match error:
            case ApiError():
                return error
            case PromptTooLong():
                return cls(400, _sentence(error), code="context_length_exceeded")
            case UsageError():
                return cls(400, _sentence(error), param=error.where if error.where.isidentifier() else None)
            case Busy():
                return cls(429, str(error), code="queue_full", headers=_retry(error.retry_after_s))
            case QueueTimeout():
                return cls(503, str(error), code="queue_timeout", headers=_retry(error.retry_after_s))
            case Draining() | Cancelled():
                return cls(503, "the server is stopping", code="draining", headers=_retry(DRAIN_RETRY_S))
            case ColiError():
                return cls(500, str(error))
            case ValidationError():
                return invalid(error)
            case HTTPException():
                return cls(error.status_code, str(error.detail), headers=error.headers)
        return cls(500, "internal error: the server's stderr says more")


def loading() -> ApiError:
    return ApiError(503, "the model is loading", code="loading", headers=_retry(1))


def unsupported(param: str, why: str, hint: str = "") -> ApiError:
    """What clients know and this server does not do: refused by name, never ignored."""
    end = f" ({hint})" if hint else ""
    return ApiError(400, f"'{param}' is not supported: {why}{end}", param=param, code="unsupported_parameter")


def model_not_found(name: str, served: str) -> ApiError:
    what = f"the model '{name}' does not exist; this server has '{served}'"
    return ApiError(404, what, param="model", code="model_not_found")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a field, under the name that another API has for it."""
    try:
        yield
    except ApiError as error:
        param = names.get(error.param or "")
        if param is None:
            raise
        message = error.message.replace(f"'{error.param}'", f"'{param}'")
        raise ApiError(error.status, message, error.type, param, error.code, error.headers) from None


# ---- shapes ----------------------------------------------------------------------------------------------------------


def openai_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def body(error: ApiError, path: str) -> dict[str, Any]:
    """The error in the shape that clients of this path read."""
    return anthropic_body(error) if path.startswith("/v1/messages") else openai_body(error)


# ---- what pydantic refuses -------------------------------------------------------------------------------------------


def parsed(model: type[Model], content: Any) -> Model:
    """`content` as a request of this kind. Raises ApiError 400 that names the field."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise invalid(error, content) from None


def invalid(error: ValidationError, content: Any = None) -> ApiError:
    """The first field that is wrong and what it should be; `content` tells fields from pydantic's names of types."""
    found = [_tagged(one) for one in error.errors(include_url=False)]
    param = _path(found[0], content)
    same = [one for one in found if _path(one, content) == param]
    kind = same[0]["type"]
    if kind == "missing":
        return ApiError(400, f"missing required parameter: '{param}'", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown parameter: '{param}'", param=param, code="unknown_parameter")
    words = " or ".join(dict.fromkeys(_words(one["msg"]) for one in same))
    return ApiError(400, f"invalid '{param}': {words}" if param else words, param=param or None, code="invalid_value")


def _tagged(error: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same of the field that says which kind an object is, where pydantic blames the object."""
    name = error.get("ctx", {}).get("discriminator", "")
    if not name.startswith("'"):
        return error
    where = {"loc": (*error["loc"], name.strip("'"))}
    if error["type"] == "union_tag_not_found":
        return {"type": "missing", "msg": "", **where}
    return {"type": error["type"], "msg": f"should be one of {error['ctx']['expected_tags']}", **where}


def _words(message: str) -> str:
    for prefix in ("Value error, ", "Assertion failed, ", "Input "):
        message = message.removeprefix(prefix)
    return message


def _path(error: Mapping[str, Any], content: Any) -> str:
    """`messages[0].content` of pydantic's location, without the names of types that stand between for a union."""
    parts: Sequence[int | str] = error["loc"]
    path, node = "", content
    for number, part in enumerate(parts):
        absent = error["type"] == "missing" and number == len(parts) - 1
        if isinstance(part, int):
            path += f"[{part}]"
            node = node[part] if isinstance(node, list) and part < len(node) else None
        elif absent or (part in node if isinstance(node, Mapping) else node is None and part.isidentifier()):
            path += f".{part}" if path else part
            node = node.get(part) if isinstance(node, Mapping) else None
    return path


def _retry(seconds: int) -> dict[str, str]:
    return {"retry-after": str(seconds)}


def _sentence(error: ColiError) -> str:
    """Without the place, which is the command line's."""
    where = f"{error.where}: " if error.where and not error.where.startswith("-") else ""
    return f"{where}{error.what}" + (f" ({error.hint})" if error.hint else "")
