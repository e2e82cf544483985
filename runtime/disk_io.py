"""Records read and written by a thread of its own, so that nobody who serves requests waits for a disk.

Comes in: a `RecordFile`, bytes to be written, places to be filled. Goes out: which jobs are done. Must not know: keys,
blocks, who asked. Standard library only.

One thread does one job after the other, in the order in which they were asked for: what is read is what was written
last before it was asked for, and a record's number may be given away as soon as its reading has been asked for. What is
to be written is copied first; while too much is on its way, writing is refused, as a cache may forget. After the first
error of writing the file is given up.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from llmc.runtime.records import RecordFile

#: Bytes of records on their way to the disk at most: a prompt of some thousand tokens may push out as many at once.
_MOST_BYTES = 128 * 2**20
#: Seconds that closing waits for the record at work.
_CLOSE_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Reading:
    """Records, each a number, a tag and parts to be filled; once it is done, `whole` says which came back as they were
    written, and `seconds` how long all of them took.
    """

    records: Sequence[tuple[int, int, Sequence[memoryview]]]
    whole: list[bool] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(eq=False, slots=True)
class Writing:
    """A record, and how long it took once it is done."""

    number: int
    tag: int
    data: bytes
    seconds: float = 0.0


class DiskIo:
    """The thread of one file. Everything but `work` is for the thread that made it. Without `start` nothing is done
    until somebody calls `work`.

    `error` is what ended it. `fileno` is readable once a reading is done.
    """

    def __init__(self, file: RecordFile, *, start: bool = True) -> None:
        self._file = file
        self._jobs: SimpleQueue[Reading | Writing | None] = SimpleQueue()
        self._done: deque[Reading | Writing] = deque()
        self._most_writing = max(_MOST_BYTES // file.payload, 1)
        #: Records that were to be written and are not known to be done.
        self.num_writing = 0
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._since: float | None = None  # when the record at work was begun
        self._closing = False
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True) if start else None
        if self._thread is not None:
            self._thread.start()

    def fileno(self) -> int:
        """To be polled."""
        return self._event

    def write(self, number: int, tag: int, parts: Sequence[memoryview]) -> bool:
        """Asks for a record to be written; False, and nothing is done, while too many are on their way."""
        if self.num_writing == self._most_writing:
            return False
        self.num_writing += 1
        self._jobs.put(Writing(number, tag, b"".join(parts)))
        return True

    def read(self, reading: Reading) -> None:
        """Asks for records to be read, into places that nobody touches until `done` returns the reading."""
        self._jobs.put(reading)

    def done(self) -> list[Reading | Writing]:
        """The jobs that were done since the last call, in order; those of an ended file count as done, and failed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        done = [self._done.popleft() for _ in range(len(self._done))]
        self.num_writing -= sum(isinstance(job, Writing) for job in done)
        return done

    def stalled_seconds(self) -> float:
        """For how long the disk has been at one record."""
        since = self._since
        return 0.0 if since is None else time.perf_counter() - since

    def stop(self) -> None:
        """No record is read or written any more, but for the one at work."""
        self._closing = True

    def close(self) -> None:
        """Ends the thread and closes the file; both are left to the end of the process if the disk does not answer."""
        self.stop()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return
        self._file.close()
        os.close(self._event)

    # The thread

    def _run(self) -> None:
        while self.work():
            pass

    def work(self) -> bool:
        """Does the next job, waiting for one; False once there will be no more."""
        job = self._jobs.get()
        if job is None:
            return False
        began = time.perf_counter()
        if isinstance(job, Reading):
            job.whole = [self._read(*record) for record in job.records]
        else:
            self._write(job)
            job.data = b""
        self._since = None
        job.seconds = time.perf_counter() - began
        self._done.append(job)
        if isinstance(job, Reading):
            os.eventfd_write(self._event, 1)
        return True

    def _read(self, number: int, tag: int, parts: Sequence[memoryview]) -> bool:
        self._since = time.perf_counter()
        return not self._is_over() and self._file.read(number, tag, parts)

    def _write(self, job: Writing) -> None:
        self._since = time.perf_counter()
        if self._is_over():
            return
        try:
            self._file.write(job.number, job.tag, [memoryview(job.data)])
        except OSError as error:
            self.error = error
            with contextlib.suppress(OSError):
                self._file.discard()

    def _is_over(self) -> bool:
        return self._closing or self.error is not None
