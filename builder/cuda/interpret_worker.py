"""The process that interprets: reads launches from its standard input, runs them on the memory it shares, answers.

Comes in: framed JSON lists of `interpret.Launch`. Goes out: an empty message, or the reason of a failure. Must not
know: graphs, operators. Imported by nobody; started by `interpret.Interpreter` with TRITON_INTERPRET set.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from itertools import product
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from llmc.builder.cuda.interpret import pointer_type, receive, send
from llmc.builder.cuda.interpret_repairs import Memory, apply
from llmc.builder.cuda.modules import load


def _scalar(value: float, dtype: tl.dtype, numpy_dtype: type) -> tl.tensor:
    handle = triton_interpreter.TensorHandle(np.array([value], numpy_dtype), dtype)
    return tl.tensor(handle, dtype)


def _argument(arg: Any, base: int) -> tl.tensor:
    if isinstance(arg, dict):
        return _scalar(base + arg["offset"], tl.str_to_ty(pointer_type(arg["dtype"]), None), np.uint64)
    if isinstance(arg, float):
        return _scalar(arg, tl.float32, np.float32)
    return _scalar(arg, tl.int32, np.int32)


def run(launch: dict[str, Any], base: int, memory: Memory) -> None:
    """One launch, program by program."""
    kernel = load(launch["kernel"], launch["source"])
    function = kernel.rewrite()
    given = {name: _argument(arg, base) for name, arg in launch["args"].items()}
    memory.allow(
        (base + arg["offset"], base + arg["offset"] + arg["nbytes"])
        for arg in launch["args"].values()
        if isinstance(arg, dict)
    )
    builder = triton_interpreter.interpreter_builder
    builder.set_grid_dim(*launch["grid"])
    for index in product(*map(range, launch["grid"])):
        builder.set_grid_idx(*index)
        try:
            function(**given, **launch["constexprs"])
        except Exception as error:
            raise RuntimeError(f"{launch['kernel']}, program {index}: {error}") from error


def main(descriptor: int, nbytes: int) -> None:
    """Serves until standard input ends."""
    shared = mmap.mmap(descriptor, nbytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints must not stand between the messages
    memory = apply()
    while (message := receive(sys.stdin.buffer)) is not None:
        answer = b""
        try:
            with np.errstate(all="ignore"):
                for launch in json.loads(message):
                    run(launch, base, memory)
        except Exception as error:
            answer = str(error).encode()
        send(answers, answer)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
