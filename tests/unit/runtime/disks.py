"""Cores whose disk is what a test needs, as text for a process: `QUICK_DISK`, perhaps `SLOW_DISK`, then `MAIN`."""

#: A core that takes its disk and its memory for quick, however busy tests keep them: else computing may be cheaper.
QUICK_DISK = """
import sys, time
from pathlib import Path
from llmc.runtime import core_main, disk_shelf, host_memory, records
measure = disk_shelf.DiskShelf._probe
def quick(self, *given):
    measure(self, *given)
    self._write = self._read = 1e-6
disk_shelf.DiskShelf._probe = quick
disk_shelf._average = lambda so_far, latest: so_far
disk_shelf.STALLED_SECONDS = float("inf")
host_memory.HostMemory.probe = lambda self, copy, pool_blocks: None
host_memory.HostMemory.observe_copy = lambda self, blocks, seconds: None
"""
#: One whose disk reads nothing but the first record, which is for measuring, until a file is there.
SLOW_DISK = """
read = records.RecordFile.read
def late(self, number, tag, parts):
    while tag and not Path({gate!r}).exists():
        time.sleep(0.01)
    return read(self, number, tag, parts)
records.RecordFile.read = late
"""
MAIN = "sys.exit(core_main.main(sys.argv))"
