"""llama.cpp's own HTTP server, from the wheel of xllamacpp, until SIGTERM.

    python -m tests.perf.llama_server MODEL.gguf --port 8001 --parallel 16 --context 1024 --threads 2

`--context` is in tokens a slot. Everything else is as `llama-server` has it by default, but for its prompt cache in
host memory, which would copy every prompt and, where none comes twice, give nothing back.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import xllamacpp


def main() -> None:
    """Serves; the constructor returns once the model is loaded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # its threads inherit that: this one takes it
    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.parallel * options.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.cache_ram_mib = 0
    params.verbosity = 1  # errors
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGTERM})
    del server  # ends its threads


if __name__ == "__main__":
    main()
