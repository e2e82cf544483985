"""The recording driver refuses what a driver refuses: so what it takes is legal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cuda.recording import run

SCRIPT = """
import ctypes, sys
from llmc.artifacts.errors import EnvironmentFault
from llmc.builder.cuda.compile import CudaCompiler, cubin_cache
from llmc.builder.cuda.variant import variant
from llmc.plugins.sampler.cuda import launch
from llmc.runtime.cuda import driver

(cubin,) = CudaCompiler(cubin_cache()).cubins([variant(launch(64), 90, {}, {})])
driver.open_device(0)
allowed, shared, blocks, threads = map(eval, sys.argv[1:])
cells = [ctypes.c_uint64(0) for _ in cubin.parameters]
pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
try:
    function = driver.load_function(cubin.code, cubin.entry, allowed)
    threads = threads or 32 * cubin.num_warps
    driver.Stream().launch(function, blocks, threads, shared, ctypes.addressof(pointers))
except EnvironmentFault as error:
    print(error)
else:
    print("launched")
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0 48<<10 (2**31-1,1,65535) 0", "launched"),
        ("100<<10 100<<10 (1,1,1) 0", "launched"),
        ("0 (48<<10)+1 (1,1,1) 0", "cuLaunchKernel"),
        ("228<<10 0 (1,1,1) 0", "cuFuncSetAttribute"),
        ("0 0 (1,65536,1) 0", "cuLaunchKernel"),
        ("0 0 (1,1,65536) 0", "cuLaunchKernel"),
        ("0 0 (2**31,1,1) 0", "cuLaunchKernel"),
        ("0 0 (1,0,1) 0", "cuLaunchKernel"),
        ("0 0 (1,1,1) 32", "cuLaunchKernel"),
    ],
)
def test_what_is_beyond_the_limits_is_refused(arguments: str, words: str, driver: Path) -> None:
    done = run(SCRIPT, arguments.split(), driver)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    if words != "launched":
        assert "CUDA_ERROR_INVALID_VALUE" in done.stdout
