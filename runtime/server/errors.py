"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, for every status.

Comes in: exceptions. Goes out: responses. Must not know: endpoints.
"""

from __future__ import annotations

import json
import logging

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from llmc.runtime.params import RequestError
from llmc.runtime.server.last_resort import end_process
from llmc.runtime.server.request_log import CLIENT_GONE

log = logging.getLogger("llmc.server")

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}

_TYPES = {429: "rate_limit_error", 503: "service_unavailable"}


class ErrorBody(msgspec.Struct):
    """The members of OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer any more."""


class ApiError(Exception):
    """An answer other than 200. `status` from 500 on is the server's fault, below it the request's. `retry_after`:
    whole seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = 1 if status == 503 and retry_after is None else retry_after
        self.body = ErrorBody(message, _type_of(status), param, code)


def _type_of(status: int) -> str:
    if status in _TYPES:
        return _TYPES[status]
    return "server_error" if status >= 500 else "invalid_request_error"


def error_json(body: ErrorBody) -> bytes:
    """The JSON of an error object."""
    # A request can name half of a surrogate pair, which no UTF-8 can repeat.
    printable = {name: _printable(value) for name, value in msgspec.structs.asdict(body).items()}
    return msgspec.json.encode({"error": printable})


def _printable(text: str | None) -> str | None:
    return None if text is None else text.encode(errors="replace").decode()


def response_of(error: ApiError) -> Response:
    """The response that says so."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(error_json(error.body), error.status, headers, "application/json")


def from_validation(error: RequestValidationError) -> ApiError:
    """One message for the first parameter that is wrong, naming it, what it should be and what it is."""
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']} at byte {first['loc'][-1]}")
    path = first["loc"][1:]
    if first["type"] == "too_long" and "param" in first.get("ctx", {}):
        return ApiError(400, first["msg"], param=_path_name((*path, first["ctx"]["param"])), code="too_long")
    if first["type"] in ("unsupported_parameter", "unknown_parameter"):
        return ApiError(400, first["msg"], param=_path_name((*path, first["ctx"]["param"])), code=first["type"])
    if not path:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    param = _path_name(path)
    same = [e for e in found if e["loc"][1] == path[0]]
    wanted = " or ".join(dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in same))
    # Of the members of a union the one that got further tells more: it has looked inside.
    for e in same:
        if e["type"] in ("unsupported_parameter", "unknown_parameter", "unsupported_content"):
            return ApiError(400, f"{param}: {e['msg']}", param=param, code=e["type"])
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    shown = _shown(first.get("input"))
    return ApiError(400, f"{param} is {shown}; it should be {wanted}", param=param, code="invalid_type")


def _shown(value: object) -> str:
    """A value as JSON, at most 80 characters: a long one is not written out first."""
    if isinstance(value, list | dict) and len(value) > 40:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} members"
    text = json.dumps(value[:100] if isinstance(value, str) else value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _path_name(path: tuple[int | str, ...]) -> str:
    """messages[0].content; pydantic also names the member of a union that it tried, which no client knows."""
    name = str(path[0])
    for part in path[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "list"):
            name += f".{part}"
        else:
            break
    return name


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "a number has too many digits" if "integer string conversion" in str(error) else str(error)


def install(app: FastAPI) -> None:
    """Makes every error of the app one of OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api(_: Request, error: ApiError) -> Response:
        return response_of(error)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)  # for the log; nobody receives it

    @app.exception_handler(RequestError)
    async def request(_: Request, error: RequestError) -> Response:
        return response_of(ApiError(400, str(error), param=error.param, code=error.code))

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> Response:
        return response_of(from_validation(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 400 and error.__cause__ is not None:
            message = f"the body cannot be read as JSON: {_reason(error.__cause__)}"
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}"
        return response_of(ApiError(error.status_code, message, code=_CODES.get(error.status_code)))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        if isinstance(error, MemoryError):
            end_process()
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return response_of(ApiError(500, f"internal error: {type(error).__name__}; the server's log has the details"))
