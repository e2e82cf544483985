"""`llmc serve`: one process with uvicorn and the front end, from the first socket to the exit code.

Comes in: `ServeConfig`. Goes out: an exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 when the engine dies.
Must not know: options parsing.

It listens before the engine is loaded: /health answers from the start, /ready once requests can be answered. On
SIGTERM it goes on listening while it drains: /ready says so, and new requests get 503, not a refused connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvicorn

from llmc.artifacts.errors import UsageError
from llmc.artifacts.plan import Plan, machine_features
from llmc.artifacts.verify import require_verified
from llmc.profiles import faster_level
from llmc.runtime.front import PROGRESS_DEADLINE
from llmc.runtime.options import CoreOptions
from llmc.runtime.server.app import AppOptions, create_app
from llmc.runtime.server.connections import bounded_protocol
from llmc.runtime.server.context import ServerContext
from llmc.runtime.server.last_resort import EndWithoutMemory, guard_loop, watch_loop
from llmc.runtime.server.logs import configure
from llmc.runtime.server.metrics import Metrics
from llmc.runtime.server.slo import Slo
from llmc.runtime.server.tls import check_tls
from llmc.runtime.service import Service

log = logging.getLogger("llmc.server")
#: After draining, responses get this long to be written; with STOP_SECONDS it bounds the exit after an engine's death.
FLUSH_SECONDS = 2
#: An idle connection is kept longer than clients and proxies keep theirs (5 to 60 s): closed by the server first, it
#: may be closed just when a request is sent over it, which then fails.
KEEP_ALIVE_SECONDS = 75
#: A server that is stopped (SIGSTOP, Ctrl-Z) answers nobody: its core kills it after so many seconds.
FRONT_STOP_SECONDS = 5.0


@dataclass(frozen=True)
class ServeConfig:
    """What to serve and where. `model` and `lock`: what the plan must match before it is loaded."""

    plan: Path
    model: Path | None = None
    lock: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    options: CoreOptions = field(default_factory=CoreOptions)
    shutdown_timeout: float = 30.0
    request_timeout: float = 30.0
    app: AppOptions = field(default_factory=AppOptions)
    certificate: Path | None = None
    certificate_key: Path | None = None
    log_format: str = "text"
    slo: Slo | None = None


class _Server(uvicorn.Server):
    """Leaves signals to `_Run`: uvicorn's own handling stops listening at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: ServeConfig, *, core_command: Seq[str] | None = None, progress_deadline: float = PROGRESS_DEADLINE
) -> int:
    """Serves until told to stop; raises LlmcError when plan, options or address are no good.

    `core_command` stands in for the core in tests; after `progress_deadline` seconds without a step it is not ready.
    """
    check_tls(config.certificate, config.certificate_key)
    plan = require_verified(config.plan, config.model, config.lock, sections=False)  # the core does, as it starts
    options = msgspec.structs.replace(config.options, front_stop_timeout=FRONT_STOP_SECONDS)
    options.check(plan.manifest.profile)
    config = dataclasses.replace(config, options=options)
    with (
        contextlib.closing(configure(config.log_format)),
        _listen(config.host, config.port) as sock,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        return runner.run(_Run(config, plan, sock, core_command, progress_deadline).main())


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error
    return sock


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


class _Run:
    """One run of the server."""

    def __init__(
        self,
        config: ServeConfig,
        plan: Plan,
        sock: socket.socket,
        core_command: Seq[str] | None,
        progress_deadline: float,
    ) -> None:
        self._config = config
        self._deadline = progress_deadline
        self._sock = sock
        self._command = core_command
        manifest = plan.manifest
        names = config.names or (manifest.model.name,)
        info = {
            "plan_digest": plan.digest,
            "checkpoint_digest": manifest.checkpoint.digest,
            "precision": manifest.build.precision,
            "tp": str(manifest.build.tp),
            "prefix_cache": "on" if config.options.reuses_prefixes(manifest) else "off",
        }
        self._context = ServerContext(plan, names, Metrics(names[0], info, config.slo))
        self._signalled: signal.Signals | None = None
        self._stop = asyncio.Event()
        app = EndWithoutMemory(create_app(self._context, config.app))
        self._http = _Server(
            uvicorn.Config(
                app,
                http=bounded_protocol(config.app.max_connections, config.request_timeout, KEEP_ALIVE_SECONDS),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                ssl_certfile=config.certificate,
                ssl_keyfile=config.certificate_key,
            )
        )

        self._context.connections = lambda: len(self._http.server_state.connections)

    async def main(self) -> int:
        """Returns the exit code."""
        loop = asyncio.get_running_loop()
        guard_loop(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        watch = asyncio.create_task(watch_loop())
        http = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        service = None
        try:
            service = await Service.start(
                self._context.plan,
                self._config.options,
                observer=self._context.metrics,
                command=self._command,
                progress_deadline=self._deadline,
            )
            self._context.metrics.front = service.front
            self._context.service = service
            await self._until(service.wait_ready())
            if not self._stop.is_set():
                self._announce(service)
                await self._until(service.front.failed.wait())
            if service.front.failure is None:
                await self._drain(service)
            failure = service.front.failure  # closing sets it too
        finally:
            self._http.should_exit = True
            await asyncio.gather(http, *([service.close()] if service else []))
            watch.cancel()
        if failure is not None:
            log.error("the engine has stopped: %s", failure)
            return 1
        return 130 if self._signalled == signal.SIGINT else 0

    async def _until(self, happening: object) -> None:
        """Waits for something, or for a signal to stop."""
        first = asyncio.ensure_future(happening)  # type: ignore[call-overload]
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((first, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if first.done():
            first.result()
        else:
            first.cancel()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signalled is not None:
            log.warning("second signal: leaving at once")
            self._http.force_exit = True
            if self._context.service is not None:
                self._context.service.front.abort_all("the server is shutting down")
            return
        self._signalled = number
        self._stop.set()

    def _announce(self, service: Service) -> None:
        core = service.front.core
        assert core is not None
        host, port = self._sock.getsockname()[:2]
        log.info(
            "serving %s on %s://%s:%d: loaded in %.2f s, %d blocks of KV, at most %d sequences and %d tokens a step",
            self._context.model,
            "http" if self._config.certificate is None else "https",
            f"[{host}]" if ":" in host else host,
            port,
            core.load_seconds,
            core.num_blocks,
            core.max_num_seqs,
            core.max_num_batched_tokens,
        )
        if isa := faster_level(self._context.plan.manifest.target, machine_features()):
            log.info("this machine can do more than the plan asks of it: one built for cpu:%s may be faster here", isa)

    async def _drain(self, service: Service) -> None:
        front = service.front
        front.draining = True
        log.info("shutting down: %d sequences to finish within %g s", front.in_flight, self._config.shutdown_timeout)
        if not await front.wait_idle(self._config.shutdown_timeout):
            log.warning("%d sequences did not finish in time", front.in_flight)
            front.abort_all("the server is shutting down")
