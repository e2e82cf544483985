"""`python fake_server.py PLAN [options of llmc serve]`: the real server over the fake core.

FAKE_PROGRESS_DEADLINE: seconds without a step after which it is not ready.
"""

import functools
import os
import sys
from pathlib import Path

from llmc.cli import main
from llmc.runtime.server import serve

FAKE_CORE = (sys.executable, str(Path(__file__).with_name("fake_core.py")))

if __name__ == "__main__":
    deadline = float(os.environ.get("FAKE_PROGRESS_DEADLINE", "10"))
    serve.serve = functools.partial(  # type: ignore[assignment]
        serve.serve, core_command=FAKE_CORE, progress_deadline=deadline
    )
    main(["serve", *sys.argv[1:]])
