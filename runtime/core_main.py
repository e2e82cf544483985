"""The core's process: `python -m llmc.runtime.core_main PLAN FD OPTIONS`. OPTIONS are `CoreOptions` as JSON.

Comes in: a plan's path, a socket to the front end, options. Goes out: messages over the socket; an exit code.
Must not know: what the core does.

A front end that is stopped answers nobody and cannot be seen to have gone. Where `front_stop_timeout` says so, a thread
of its own ends it then, and with it this process: the core's loop may itself be waiting for it to read.

Whatever stops it is sent as `Fatal` first, if anybody is still there to read it. Exit codes: those of LlmcError where
the plan cannot be loaded, 1 for a failure while serving, 0 when it was told to stop or its front end has gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback

import msgspec

from llmc.artifacts.errors import LlmcError, PlanError, UsageError
from llmc.artifacts.plan import Plan
from llmc.runtime.channel import Channel, ChannelClosed
from llmc.runtime.core import Core
from llmc.runtime.executor import ParentGone
from llmc.runtime.machine import die_with, is_stopped
from llmc.runtime.messages import Fatal, ToCore
from llmc.runtime.options import CoreOptions

_WATCH_SECONDS = 0.5


def _process_age() -> float:
    """Seconds since this process was started, imports included."""
    with open("/proc/self/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _serve(path: str, channel: Channel[ToCore], options: str) -> int:
    try:
        wanted = msgspec.json.decode(options, type=CoreOptions)
    except msgspec.DecodeError as error:
        raise UsageError(f"the core's options {options!r} are not valid: {error}") from error
    plan = Plan.open(path, verify=False)
    if wanted.digest not in (None, plan.digest):
        raise PlanError(f"{path}: was replaced while it was being loaded; start again")
    if wanted.front_stop_timeout is not None:
        arguments = (os.getppid(), wanted.front_stop_timeout)
        threading.Thread(target=_watch_front, args=arguments, daemon=True).start()
    with Core(plan, channel, wanted) as core:
        return core.run(_process_age())


def _watch_front(front: int, patience: float) -> None:
    """Kills process `front` once it has been stopped for `patience` seconds of this process's own turns."""
    stopped = 0
    while stopped * _WATCH_SECONDS < patience:
        time.sleep(_WATCH_SECONDS)
        stopped = stopped + 1 if is_stopped(front) else 0
    print(
        f"error: the front end has been stopped for {patience:g} s; it is killed, so that no client waits for ever",
        file=sys.stderr,
        flush=True,
    )
    os.kill(front, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Serves one front end."""
    # Whoever wants the server to stop tells the front end, which drains; a signal to the whole group comes here too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, path, descriptor, options = argv
    channel: Channel[ToCore] = Channel(socket.socket(fileno=int(descriptor)), ToCore)
    # A front end that had gone before this line has closed the channel, which is noticed there.
    die_with(os.getppid())
    try:
        return _serve(path, channel, options)
    except (ChannelClosed, ParentGone):
        return 0
    except LlmcError as error:
        reason, code = str(error), error.exit_code
    except Exception as error:
        traceback.print_exc()
        reason, code = f"internal error of the engine core: {error!r}; a traceback is in the log", 1
    with contextlib.suppress(ChannelClosed):
        channel.send(Fatal(reason))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
