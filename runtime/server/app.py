"""The FastAPI application: endpoints, error shape, size limit. Knows a `ServerContext`, starts and ends nothing.

Comes in: a context whose service may still be missing (loading). Goes out: an ASGI application.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.server import chat, completions, errors
from llmc.runtime.server.context import ServerContext, of

MAX_BODY_BYTES = 8 * 2**20
VERSION = importlib.metadata.version("llmc")
router = APIRouter()


def create_app(context: ServerContext, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The application of one plan."""
    app = FastAPI(title="llmc", version=VERSION, docs_url=None, redoc_url=None)
    app.state.context = context
    app.include_router(router)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    errors.install(app)
    return app


class BodyLimit:
    """Refuses bodies over `max_bytes` with 413, before they are held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > self._max:
                    raise HTTPException(413, f"the body is over the limit of {self._max} bytes")
            return message

        await self._app(scope, counted, send)


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "llmc",
        "root": context.plan.manifest.model.name,
        "max_model_len": context.plan.manifest.profile.max_seq_len,
        "sampling_defaults": context.service.text.defaults if context.service else {},
    }


@router.get("/v1/models", summary="What is served")
async def models(request: Request) -> dict[str, Any]:
    """`max_model_len` bounds prompt and answer together; `sampling_defaults` hold for what a request leaves out."""
    context = of(request)
    return {"object": "list", "data": [_model(context, name) for name in context.names]}


@router.get("/v1/models/{name:path}", summary="One model")
async def model(name: str, request: Request) -> dict[str, Any]:
    """404 for a name that is not served."""
    context = of(request)
    context.check_model(name)
    return _model(context, name)


@router.get("/health", summary="Is the process alive")
async def health(request: Request) -> Response:
    """200 while the engine lives or loads; 503 once it has died. Restart on 503; route by /ready."""
    service = of(request).service
    if service is not None and service.front.failure is not None:
        raise errors.ApiError(503, f"the engine has stopped: {service.front.failure}", code="engine_dead")
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get("/ready", summary="Does generation work")
async def ready(request: Request) -> Response:
    """200 only while requests are answered: loaded, alive, not shutting down, and making steps while it has work."""
    if (reason := of(request).not_ready()) is not None:
        raise errors.ApiError(503, reason, code="not_ready")
    return Response(b'{"status":"ready"}', media_type="application/json")


@router.get("/version", summary="Which engine this is")
async def version(request: Request) -> dict[str, Any]:
    """Versions, and the digests that pin plan and checkpoint."""
    plan = of(request).plan
    manifest = plan.manifest
    return {
        "version": VERSION,
        "format": manifest.format,
        "compiler": manifest.build.compiler,
        "plan_digest": plan.digest,
        "checkpoint_digest": manifest.checkpoint.digest,
        "target": f"{manifest.target.kind}:{manifest.target.isa}",
        "precision": manifest.build.precision,
        "tp": manifest.build.tp,
    }


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """vLLM's names under the prefix llmc:."""
    return Response(of(request).metrics.scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")
