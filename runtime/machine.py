"""How an engine's processes depend on each other and on the machine.

Comes in: process ids. Goes out: whether they run, why they ended. Must not know: plans. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
#: Seconds after which a process of the engine that is stopped (SIGSTOP, a debugger) counts as lost.
STOPPED_SECONDS = 3.0


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; ends it if `parent` is gone already.

    It holds for a process that hangs or is stopped, which would never see that a socket has closed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Whether a process is halted, so that no amount of waiting will help. False for one that is not there."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def ending(code: int) -> str:
    """How a process with this exit code (negative: a signal's number) has ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    hint = "; if the kernel ran out of memory, lower --kv-bytes" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.Signals(-code).name}){hint}"


def has_gpu_driver() -> bool:
    """Whether NVIDIA's driver is installed. Asked of the loader: bindings hang where they find no library."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
