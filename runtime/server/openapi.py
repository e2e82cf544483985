"""The OpenAPI document: FastAPI's, with the answers that this server really gives.

Comes in: the application. Goes out: the document at /openapi.json. Must not know: how endpoints do what they say.

FastAPI derives requests from their models. It cannot see answers, which are encoded by hand, and it promises 422 where
this server answers 400 in OpenAI's shape.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from llmc.runtime.server.access import OPEN_PATHS
from llmc.runtime.server.chat import ChatCompletion
from llmc.runtime.server.completions import Completion
from llmc.runtime.server.errors import ErrorBody

_REF = "#/components/schemas/"
_MEANINGS = {
    "400": "The request cannot be honoured; `param` names what is wrong.",
    "401": "No valid API key was sent.",
    "404": "No such model.",
    "413": "The body is over --max-body-bytes.",
    "429": "The queue is full, or the request waited too long; Retry-After says when to come again.",
    "500": "Generation failed.",
    "503": "Generation does not work now.",
}
_GENERATION = ("400", "404", "413", "429", "500", "503")
#: What may go wrong, by path.
_ERRORS: dict[str, tuple[str, ...]] = {
    "/v1/models/{name}": ("404",),
    "/health": ("503",),
    "/ready": ("503",),
    "/v1/completions": _GENERATION,
    "/v1/chat/completions": _GENERATION,
}


class ErrorResponse(msgspec.Struct):
    """Every answer that is no success."""

    error: ErrorBody


def install(app: FastAPI, keys: bool) -> None:
    """Replaces the app's document. `keys`: whether requests must carry one."""
    app.openapi = lambda: _document(app, keys)  # type: ignore[method-assign]


def _document(app: FastAPI, keys: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = msgspec.json.schema_components(
            (Completion, ChatCompletion, ErrorResponse), ref_template=_REF + "{name}"
        )
        components = document["components"]["schemas"]
        components.pop("HTTPValidationError", None)
        components.pop("ValidationError", None)
        components |= schemas
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"] = _responses(path, keys)
        if keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        app.openapi_schema = document
    return app.openapi_schema


def _responses(path: str, keys: bool) -> dict[str, Any]:
    errors = _ERRORS.get(path, ()) + (("401",) if keys and path not in OPEN_PATHS else ())
    error = {"application/json": {"schema": {"$ref": f"{_REF}ErrorResponse"}}}
    found = {"200": {"description": "The answer.", "content": _content(path)}}
    return found | {status: {"description": _MEANINGS[status], "content": error} for status in sorted(errors)}


def _content(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return {"application/json": {"schema": {"type": "object"}}}
    kind = "Completion" if path == "/v1/completions" else "ChatCompletion"
    # With `stream`: events whose data are JSON objects, the last [DONE].
    return {
        "application/json": {"schema": {"$ref": f"{_REF}{kind}"}},
        "text/event-stream": {"schema": {"type": "string"}},
    }
