"""The log: lines on stderr, as text or JSON, written by a thread of its own.

Comes in: log records. Goes out: lines. Must not know: what they say.

Whoever reads stderr may be slow or stuck. The server then loses lines, and says how many, rather than wait.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from datetime import UTC, datetime
from typing import Any

import msgspec

_MAX_LINES = 10_000
#: At the end, so long may the last lines take, in seconds.
_FLUSH_SECONDS = 1.0


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, and its message or (`extra={"fields": ...}`) its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class LogThread(logging.Handler):
    """Formats records where they arise and hands the lines to a thread. `close` waits a moment for the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging. Never waits."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._lost = self._lost, 0
            if lost:
                said = {"name": __name__, "levelname": "WARNING", "msg": f"{lost} lines are lost: nobody read stderr"}
                line = f"{self.format(logging.makeLogRecord(said))}\n{line}"
            # Not by way of sys.stderr: its lock would be held while the write waits.
            os.write(2, f"{line}\n".encode(errors="replace"))

    def close(self) -> None:
        """See logging."""
        try:
            self._lines.put_nowait(None)
            self._thread.join(_FLUSH_SECONDS)
        except queue.Full:
            pass  # nobody reads stderr: there is no use in waiting
        super().close()


def configure(log_format: str) -> LogThread:
    """Sends everything from level INFO on to stderr, as `text` or `json`, until the handler is closed."""
    handler = LogThread()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return handler
