"""The FastAPI application: endpoints, error shape, and what a request passes first: log, origins, keys, size limit.

Comes in: a context whose service may still be missing (loading). Goes out: an ASGI application. It starts
and ends nothing.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

from llmc.runtime.server import chat, completions, errors, openapi
from llmc.runtime.server.access import ApiKeys, RequireKey
from llmc.runtime.server.body import MAX_BODY_BYTES, BodyLimit
from llmc.runtime.server.connections import MAX_CONNECTIONS, ConnectionLimit
from llmc.runtime.server.context import ServerContext, of
from llmc.runtime.server.request_log import RequestLog

VERSION = importlib.metadata.version("llmc")
router = APIRouter()


@dataclass(frozen=True)
class AppOptions:
    """Who may ask, and for how much. `origins`: of web pages whose scripts may read answers; "*" for all."""

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    max_connections: int = MAX_CONNECTIONS
    log_requests: bool = True


def create_app(context: ServerContext, options: AppOptions) -> FastAPI:
    """The application of one plan. A request passes what was added last first."""
    app = FastAPI(title="llmc", version=VERSION, docs_url=None, redoc_url=None)
    app.state.context = context
    app.include_router(router)
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    count = lambda: context.connections()  # noqa: E731, PLW0108 - who counts is known only once the server runs
    app.add_middleware(ConnectionLimit, most=options.max_connections, count=count)
    if options.keys:
        app.add_middleware(RequireKey, keys=ApiKeys(options.keys))
    if options.origins:
        app.add_middleware(CORSMiddleware, allow_origins=options.origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestLog, count=context.metrics.on_response, lines=options.log_requests)
    errors.install(app)
    openapi.install(app, keys=bool(options.keys))
    return app


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
