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
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai

FAKE_CORE = str(Path(__file__).with_name("fake_core.py"))
FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
ROOT = Path(__file__).resolve().parents[3]


def _stalled() -> float:
    """Seconds for which some process of this machine had to wait for a processor; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split()[4].partition("=")[2]) / 1e6
    except OSError:
        return 0.0


class Stopwatch:
    """Time as far as it is the server's own: where processors are taken by others, up to four times as long."""

    def __init__(self) -> None:
        self._began, self._stalled = time.monotonic(), _stalled()

    def seconds(self) -> float:
        taken = time.monotonic() - self._began
        return taken - 0.75 * min(_stalled() - self._stalled, taken)

    def wait(self, done: Callable[[], object], seconds: float) -> bool:
        """Waits until `done`, or until the watch shows so many seconds; says whether it came to be."""
        while not done():
            if self.seconds() > seconds:
                return False
            time.sleep(0.02)
        return True


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
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)
        self.log = ""

    def wait_ready(self, seconds: float = 60) -> None:
        self.wait_for(lambda: self.status("/ready") == 200, seconds)

    def wait_for(self, condition: Callable[[], object], seconds: float = 10) -> None:
        def happened() -> bool:
            assert self.process.poll() is None, self.finish() or self.log
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

    def finish(self, seconds: float = 10) -> int:
        """Waits for the end; returns the exit code."""
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
#: worker processes has ports of its own.
_PORTS = itertools.count(20000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12000)


def _free_port() -> int:
    """The next one that nobody listens at."""
    for port in _PORTS:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
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
