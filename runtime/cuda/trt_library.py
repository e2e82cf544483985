"""TensorRT, as far as running engines needs it: the only place of the runtime that imports it, and only where a plan
asks for it. As a program (`python -m llmc.runtime.cuda.trt_library`) it prints one line of JSON: `tensorrt`, the
version, or `error`.

Comes in: nothing. Goes out: the module, or EnvironmentFault. Must not know: plans.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from llmc.artifacts.errors import EnvironmentFault, LlmcError


def load() -> Any:
    """The module `tensorrt`. Raises EnvironmentFault where it is not there or cannot be loaded."""
    try:
        import tensorrt
    except ImportError as error:
        raise EnvironmentFault(
            f"TensorRT, which runs this plan, cannot be used ({error}): pip install tensorrt (needs NVIDIA's package "
            "index), or serve a plan that was built with --target cuda"
        ) from error
    return tensorrt


def main() -> int:
    """Always answers; the exit code is 0 also where there is none."""
    try:
        found = {"tensorrt": str(load().__version__)}
    except (LlmcError, OSError, RuntimeError) as error:
        found = {"error": str(error)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
