"""The CUDA driver as the rest of this folder calls it: errors become exceptions, sizes and addresses are ints.

Comes in: numbers. Goes out: the same. Must not know: plans, programs. Importing this imports cuda-python; whoever does
has asked `runtime.machine.has_gpu_driver` before, as the bindings hang where there is no library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from llmc.artifacts.errors import EnvironmentFault

#: Dynamic shared memory of a block that needs no leave (CUDA C++ Programming Guide, shared memory of 8.0).
_FREE_SHARED = 48 << 10


class OutOfMemory(EnvironmentFault):
    """The GPU's memory does not hold it."""


def call(name: str, *arguments: Any) -> Any:
    """Calls a function of the driver; returns its result, or a tuple of them. Raises EnvironmentFault, an OutOfMemory
    where that is why.
    """
    error, *results = getattr(cu, name)(*arguments)
    if error != cu.CUresult.CUDA_SUCCESS:
        _, text = cu.cuGetErrorString(error)
        words = text.decode() if isinstance(text, bytes) else "no message"
        kind = OutOfMemory if error == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY else EnvironmentFault
        raise kind(f"the GPU's driver: {name}: {words} ({getattr(error, 'name', error)})")
    return results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True)
class Device:
    """A GPU: `sm` 90 is compute capability 9.0; `total` and `free` bytes of memory."""

    name: str
    sm: int
    total: int
    free: int


def version() -> int:
    """Of the driver: 13000 is CUDA 13.0."""
    call("cuInit", 0)
    return int(call("cuDriverGetVersion"))


def devices() -> list[Device]:
    """The GPUs of this machine, in the driver's order."""
    call("cuInit", 0)
    return [_device(number) for number in range(int(call("cuDeviceGetCount")))]


def _device(number: int) -> Device:
    handle = call("cuDeviceGet", number)
    attribute = cu.CUdevice_attribute
    major, minor = (
        int(call("cuDeviceGetAttribute", what, handle))
        for what in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    name = call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode(errors="replace")
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", handle))
    free, total = call("cuMemGetInfo")
    call("cuDevicePrimaryCtxRelease", handle)
    return Device(name, 10 * major + minor, int(total), int(free))


def open_device(number: int) -> None:
    """Makes a GPU the one that this process works on."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", number)))


def allocate(size: int) -> int:
    """The address of so many bytes of the GPU's memory; of one at least."""
    return int(call("cuMemAlloc", max(size, 1)))


def allocate_pinned(size: int) -> int:
    """The address of so many bytes of host memory that the GPU copies by itself; of one at least."""
    return int(call("cuMemHostAlloc", max(size, 1), 0))


def pin(address: int, size: int) -> None:
    """Makes mapped host memory, from a page boundary on, such memory."""
    call("cuMemHostRegister", address, size, 0)


def load_function(code: bytes, entry: str, shared: int) -> Any:
    """A kernel of a cubin, allowed `shared` bytes of dynamic shared memory."""
    function = call("cuModuleGetFunction", call("cuModuleLoadData", code), entry.encode())
    if shared > _FREE_SHARED:
        most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, most, shared)
    return function


class Stream:
    """A queue of work on the GPU, in order."""

    def __init__(self) -> None:
        self.handle = call("cuStreamCreate", cu.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def launch(self, function: Any, blocks: tuple[int, int, int], threads: int, shared: int, arguments: int) -> None:
        """`arguments`: the address of an array with the address of each."""
        call("cuLaunchKernel", function, *blocks, threads, 1, 1, shared, self.handle, arguments, 0)

    def upload(self, device: int, host: int, size: int) -> None:
        """Host to GPU."""
        if size:
            call("cuMemcpyHtoDAsync", device, host, size, self.handle)

    def download(self, host: int, device: int, size: int) -> None:
        """GPU to host."""
        if size:
            call("cuMemcpyDtoHAsync", host, device, size, self.handle)

    def download_rows(self, host: int, host_pitch: int, device: int, width: int, rows: int) -> None:
        """Rows of `width` bytes that lie side by side on the GPU, to rows that lie `host_pitch` bytes apart."""
        if not rows or not width:
            return
        copy = cu.CUDA_MEMCPY2D()
        copy.srcMemoryType, copy.dstMemoryType = (
            cu.CUmemorytype.CU_MEMORYTYPE_DEVICE,
            cu.CUmemorytype.CU_MEMORYTYPE_HOST,
        )
        copy.srcDevice, copy.srcPitch = device, width
        copy.dstHost, copy.dstPitch = host, host_pitch
        copy.WidthInBytes, copy.Height = width, rows
        call("cuMemcpy2DAsync", copy, self.handle)

    def wait(self) -> None:
        """Returns when all work is done. Raises EnvironmentFault where a kernel failed."""
        call("cuStreamSynchronize", self.handle)

    def begin_capture(self) -> None:
        """From here on work is recorded and not done."""
        call("cuStreamBeginCapture", self.handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self) -> Any:
        """What was recorded."""
        return call("cuStreamEndCapture", self.handle)

    def replay(self, graph: ReadyGraph) -> None:
        """Does what was recorded."""
        call("cuGraphLaunch", graph.handle, self.handle)


class ReadyGraph:
    """What was captured, ready to be replayed. Raises OutOfMemory."""

    def __init__(self, captured: Any) -> None:
        self.handle = call("cuGraphInstantiate", captured, 0)

    def destroy(self) -> None:
        """Gives its memory back, behind a replay that still runs."""
        call("cuGraphExecDestroy", self.handle)


def destroy_graph(captured: Any) -> None:
    """Of `Stream.end_capture`."""
    call("cuGraphDestroy", captured)


class Event:
    """A point in a stream."""

    def __init__(self) -> None:
        self.handle = call("cuEventCreate", cu.CUevent_flags.CU_EVENT_DEFAULT)

    def record(self, stream: Stream) -> None:
        """Puts it behind all work so far."""
        call("cuEventRecord", self.handle, stream.handle)

    def nanoseconds_since(self, earlier: Event) -> int:
        """Between two that have been passed."""
        return round(1e6 * float(call("cuEventElapsedTime", earlier.handle, self.handle)))
