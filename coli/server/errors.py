"""One error, in the shape of either API.

Every refusal is an `ApiError`: the status, a sentence, and OpenAI's type, param and code. `ApiError.of` makes one of
any exception: coli's own (a user's mistake is 400, an overlong prompt 400 `context_length_exceeded`, the rest 500), the
scheduler's (busy 429, draining or waited too long 503, each with Retry-After), pydantic's and Starlette's. What is
unexpected is a 500 that says nothing of the fault; the traceback is the server's to say.
Routes under /v1/messages speak Anthropic's shape, and so does what is said to its clients, who name their version in a
header; all others speak OpenAI's (`body`).
A field is named by its path in the request. pydantic's own path also has the names of a union's members in it: they
are told from fields by the model's schema (`_fields`), for a member may be called as one of its fields is.
Invariant: a mistake of the client is never a 5xx, for routers take that as a dead server.
Guarded by tests/server/test_errors.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from coli.errors import ColiError, PromptTooLong, UsageError
from coli.server.job import Busy, Cancelled, Draining, QueueTimeout

INVALID = "invalid_request_error"
TYPES = {429: "rate_limit_error"}  # of OpenAI, by status; other 4xx are INVALID, 5xx "server_error"
ANTHROPIC_TYPES = {
    400: INVALID, 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip
DRAIN_RETRY_S = 5  # a restart is expected after a drain
MOST_FIELDS = 4096  # of any object in a request
MOST_ITEMS = 16_384  # of the longest list of a schema
MOST_TOLD = 100  # of pydantic's errors, read for the one that is said
Model = TypeVar("Model", bound=BaseModel)
Only = Mapping[str, tuple[Sequence[Any], str]]  # field -> values that ask for nothing, why others are refused


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
                return cls(400, _sentence(error), param=_param(error), code="context_length_exceeded")
            case UsageError():
                return cls(400, _sentence(error), param=_param(error), code="invalid_value")
            case Busy():
                return cls(429, str(error), code="queue_full", headers=_retry(error.retry_after_s))
            case QueueTimeout():
                return cls(503, str(error), code="queue_timeout", headers=_retry(error.retry_after_s))
            case Draining() | Cancelled():
                return cls(503, "the server is stopping", code="draining", headers=_retry(DRAIN_RETRY_S))
            case ColiError():
                return cls(500, _sentence(error))
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


def without(content: Mapping[str, Any], only: Only, path: str = "") -> dict[str, Any]:
    """`content` without the fields of `only`. Raises ApiError for one that asks for something; null and an empty list
    ask for nothing. `path` stands before their names."""
    for name, (nothing, why) in only.items():
        value = content.get(name)
        if value not in (None, []) and not any(value == one and type(value) is type(one) for one in nothing):
            raise unsupported(path + name, why)
    return {name: value for name, value in content.items() if name not in only}


def missing(param: str) -> ApiError:
    return ApiError(400, f"missing required parameter: '{param}'", param=param, code="missing_required_parameter")


def model_not_found(name: str, served: str) -> ApiError:
    what = f"the model '{name}' does not exist; this server has '{served}'"
    return ApiError(404, what, param="model", code="model_not_found")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a field, under the name that another API has for it."""
    try:
        yield
    except (ApiError, UsageError, PromptTooLong) as refusal:
        error = ApiError.of(refusal)
        param = names.get(error.param or "")
        if param is None:
            raise
        message = error.message.replace(f"'{error.param}'", f"'{param}'")
        raise ApiError(error.status, message, error.type, param, error.code, error.headers) from None


# ---- shapes ----------------------------------------------------------------------------------------------------------


def openai_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def body(error: ApiError, scope: Scope) -> dict[str, Any]:
    """The error in the shape that this request's client reads."""
    if scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope):
        return anthropic_body(error, scope["state"]["request_id"])
    return openai_body(error)


# ---- what pydantic refuses -------------------------------------------------------------------------------------------

Parts = tuple[int | str, ...]  # the way to a value: names and places in lists


def parsed(model: type[Model], content: Any) -> Model:
    """`content` as a request of this kind. Raises ApiError 400 that names the field."""
    _check_width(content)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise invalid(error, model) from None


def bounded(most: int) -> Any:
    """For a list of a schema: the first item that is wrong, or one too many, is the last that is read and the only
    one told of. Stands right behind the list."""
    return Field(max_length=most, fail_fast=True)


def _check_width(content: Any) -> None:
    """Every field of an object can be wrong, and pydantic tells of each; of a list it tells of the first alone (the
    schemas say so). Raises ApiError 400."""
    for name, value in content.items() if isinstance(content, Mapping) else ():
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict):
                if len(one) > MOST_FIELDS:
                    raise _too_wide(f"invalid '{name}': an object in it", name)
                waiting.extend(one.values())
            elif isinstance(one, list) and len(one) <= MOST_ITEMS:  # longer ones are refused unread
                waiting.extend(one)
    if isinstance(content, Mapping) and len(content) > MOST_FIELDS:
        raise _too_wide("the request", None)


def _too_wide(what: str, param: str | None) -> ApiError:
    return ApiError(400, f"{what} has more than {MOST_FIELDS:,} fields", param=param, code="invalid_value")


def invalid(error: ValidationError, model: type[BaseModel] | None = None) -> ApiError:
    """The first field that is wrong and what it should be."""
    errors = error.errors(include_url=False)[:MOST_TOLD]
    found = [_told(one, model) for one in errors]
    param, kind, _ = found[0]
    if isinstance(errors[0]["input"], Mapping):  # a word might stand here as well, but an object was sent
        param, kind, _ = next((one for one in found if one[0].startswith(f"{param}.")), found[0])
    if kind == "missing":
        return missing(param)
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown parameter: '{param}'", param=param, code="unknown_parameter")
    words = " or ".join(dict.fromkeys(words for one, _, words in found if one == param))
    return ApiError(400, f"invalid '{param}': {words}" if param else words, param=param or None, code="invalid_value")


def _told(error: Mapping[str, Any], model: type[BaseModel] | None) -> tuple[str, str, str]:
    """The field, the kind of mistake and what should be there."""
    kind, where = error["type"], _place(model, error["loc"])
    if kind in _NO_OBJECT or (kind == "union_tag_not_found" and not isinstance(error["input"], Mapping)):
        kind, words = "no_object", "should be an object"
    elif kind in ("union_tag_not_found", "union_tag_invalid"):  # blames the object, where a field of it is wrong
        where = (*where, error["ctx"]["discriminator"].strip("'_()"))  # a function is called as the field it reads
        kind = "missing" if kind == "union_tag_not_found" else kind
        words = f"should be one of {error['ctx'].get('expected_tags')}"
    else:
        words = _words(error["msg"])
    if error["input"] is None and kind != "extra_forbidden" and len(where) == 1 and where[0] in _required(model):
        kind = "missing"  # null is the same as left out
    return _spelled(where), kind, words


_NO_OBJECT = frozenset({"model_type", "model_attributes_type", "dict_type"})


def _words(message: str) -> str:
    for prefix in ("Value error, ", "Assertion failed, ", "Input "):
        message = message.removeprefix(prefix)
    return message.replace(" after validation,", ",")


def _spelled(parts: Parts) -> str:
    """`messages[0].content`"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _required(model: type[BaseModel] | None) -> frozenset[str]:
    fields = model.model_fields if model is not None else {}
    return frozenset(field.alias or name for name, field in fields.items() if field.is_required())


def _place(model: type[BaseModel] | None, loc: Parts) -> Parts:
    """A location of pydantic's as the way through the request."""
    if model is None:
        return loc
    schema = model.__pydantic_core_schema__
    found = _fields(schema, _definitions(model), loc)
    return loc if found is None else found


@cache
def _definitions(model: type[BaseModel]) -> dict[str, Any]:
    schema: Any = model.__pydantic_core_schema__
    return {one["ref"]: one for one in schema.get("definitions", ())}


def _fields(schema: Any, known: Mapping[str, Any], loc: Parts) -> Parts | None:
    """The parts of `loc` that are in the request; the others name members of unions. None: it is not of this schema."""
    if not loc:
        return ()
    part, rest = loc[0], loc[1:]
    match schema:
        case {"type": "definition-ref", "schema_ref": ref}:
            return _fields(known[ref], known, loc)
        case {"type": "model-fields", "fields": fields}:
            inner = next((one for name, one in fields.items() if part in (name, one.get("validation_alias"))), None)
            return loc if inner is None else _behind(part, inner["schema"], known, rest)
        case {"type": "tagged-union", "choices": choices}:
            return _fields(choices[part], known, rest) if part in choices else None
        case {"type": "union", "choices": choices}:
            found = (_fields(one[0] if isinstance(one, tuple) else one, known, rest) for one in choices)
            return next((parts for parts in found if parts is not None), None)
        case {"type": "list", "items_schema": items}:
            return _behind(part, items, known, rest) if isinstance(part, int) else None
        case {"type": "dict"}:
            return (part,) if rest == ("[key]",) else _behind(part, schema["values_schema"], known, rest)
        case {"schema": inner}:  # a wrapper
            return _fields(inner, known, loc)
    return None


def _behind(part: int | str, schema: Any, known: Mapping[str, Any], rest: Parts) -> Parts | None:
    inner = _fields(schema, known, rest)
    return None if inner is None else (part, *inner)


def _retry(seconds: int) -> dict[str, str]:
    return {"retry-after": str(seconds)}


def _param(error: ColiError) -> str | None:
    """The field, unless it is the command line's."""
    return error.where if error.where.isidentifier() else None


def _sentence(error: ColiError) -> str:
    """Without the place where it is the command line's or a path of this machine's, or where the words say it."""
    told = (isinstance(error, PromptTooLong) or error.where.startswith("-") or error.what.startswith(error.where)
            or "/" in error.where or os.sep in error.where)  # fmt: skip
    where = "" if told else error.where
    return (f"{where}: " if where else "") + error.what + (f" ({error.hint})" if error.hint else "")
