"""Starts real servers, in processes of their own, on real sockets: over the fake core, or over a real plan."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai

from tests.unit.runtime.stopwatch import Stopwatch

FAKE_CORE = str(Path(__file__).with_name("fake_core.py"))
FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
ROOT = Path(__file__).resolve().parents[3]
#: No test ends for want of an answer before this, in seconds: a machine may be slow, or stand still.
LONG = 250


class Server:
    """A running server. `log` is what it has written to stderr, once it has ended."""

    def __init__(
        self, command: list[str], env: dict[str, str], port: int | None = None, stderr: int | None = None
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], env={**os.environ, **env}, stderr=stderr or self._stderr, cwd=ROOT
        )
        self.http = httpx.Client(base_url=self.url, timeout=LONG)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LONG)
        self.log = ""

    def wait_ready(self, seconds: float = 60) -> None:
        self.wait_for(lambda: self.status("/ready") == 200, seconds)

    def wait_for(self, condition: Callable[[], object], seconds: float = 30) -> None:
        def happened() -> bool:
            assert self.process.poll() is None, f"it ended with {self.finish()}: {self.log}"
            return bool(condition())

        assert Stopwatch().wait(happened, seconds), "the condition did not come true in time"

    def status(self, path: str) -> int | None:
        """The status of a GET; None while nothing listens."""
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return None

    def metric(self, name: str) -> float:
        """The value of a metric, all labels summed."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"llmc:{name}{{")]
        assert found, f"no metric {name}"
        return sum(found)

    def core_pid(self) -> int:
        """The process id of the engine core."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = (int(child) for child in children)
        return pid

    def finish(self, seconds: float = 60) -> int:
        """Waits for the end, which may come before it was ready; returns the exit code."""
        if not Stopwatch().wait(lambda: self.process.poll() is not None, seconds):
            raise subprocess.TimeoutExpired(self.process.args, seconds)
        self._stderr.seek(0)
        self.log = self._stderr.read().decode()
        return self.process.returncode

    def close(self) -> None:
        self.http.close()
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.finish(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.finish()


#: Below those that the kernel gives to connections, which may take one before the server binds it; each of pytest's
#: worker processes begins at a port of its own.
_PORTS = itertools.count(20000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12000)
#: By port: a name that this process alone has on the machine, while it lives: there may be another run of the tests.
_RESERVED: dict[int, socket.socket] = {}


def _free_port() -> int:
    """The next one that nobody listens at, and no other test's server is to listen at."""
    for port in _PORTS:
        with contextlib.suppress(OSError):
            name = socket.socket(socket.AF_UNIX)
            name.bind(f"\0llmc-test-port-{port}")
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", port))
            _RESERVED[port] = name
            return port
    raise AssertionError


@contextlib.contextmanager
def fake_server(
    plan: Path,
    *arguments: str,
    ready: bool = True,
    port: int | None = None,
    stderr: int | None = None,
    **env: str,
) -> Iterator[Server]:
    server = Server([sys.executable, FAKE_SERVER, str(plan), *arguments], env, port, stderr)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def real_server(plan: Path, *arguments: str) -> Iterator[Server]:
    server = Server([sys.executable, "-m", "llmc", "serve", str(plan), *arguments], {})
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()
