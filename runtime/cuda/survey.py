"""The process that asks the driver which GPUs there are: `python -m llmc.runtime.cuda.survey` prints one line of JSON.

Comes in: nothing. Goes out: `driver` and `gpus`, or `error`. Must not know: plans.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from llmc.artifacts.errors import LlmcError


def main() -> int:
    """Always answers; the exit code is 0 also where the driver fails."""
    try:
        from llmc.runtime.cuda import driver

        found = {"driver": driver.version(), "gpus": [asdict(device) for device in driver.devices()]}
    except (LlmcError, ImportError, RuntimeError) as error:
        found = {"error": f"the GPU's driver cannot be used: {error}"}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
