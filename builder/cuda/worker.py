"""A process that compiles kernels: `Variant`s come in on standard input, `Cubin`s or errors go out on standard output.

Messages are msgpack behind their length in four bytes. It is a process of its own so that Triton sees no environment
but what `compile.py` gives it, several compile at once, and a compiler that dies takes nothing with it. Must not know:
caches, graphs.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import IO, Any

import msgspec

from llmc.builder.cuda.cubin import SCRATCH_PARAMETERS, Cubin
from llmc.builder.cuda.modules import load
from llmc.builder.cuda.variant import ALIGNMENT, Variant

#: The PTX that ptxas is given, for all architectures; and a * b + c may become one instruction. Said here because
#: the defaults follow Triton's version and the environment.
PTX_VERSION = 87
FP_FUSION = True

_LENGTH = struct.Struct("<I")


class Failure(msgspec.Struct, frozen=True, tag=True):
    """What the compiler said where it failed."""

    message: str


class Success(msgspec.Struct, frozen=True, tag=True):
    """What it made, and the PTX that it was made of."""

    cubin: Cubin
    ptx: str


def read(stream: IO[bytes]) -> bytes | None:
    """The next message, or None where the other side has closed."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    data = stream.read(length)
    return data if len(data) == length else None


def write(stream: IO[bytes], data: bytes) -> None:
    """Sends a message."""
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def compile_variant(variant: Variant) -> Success:
    """Compiles with Triton, which raises what it likes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function: Any = load(variant.kernel, variant.source)
    names = [name for name, _ in variant.signature]
    source = ASTSource(
        fn=function,
        signature=dict(variant.signature),
        constexprs=dict(variant.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in variant.divisible},
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "ptx_version": PTX_VERSION,
        "enable_fp_fusion": FP_FUSION,
    }
    made = triton.compile(source, target=GPUTarget("cuda", variant.sm, 32), options=options)
    about = made.metadata
    cubin = Cubin(
        code=made.asm["cubin"],
        entry=about.name,
        num_warps=about.num_warps,
        num_ctas=about.num_ctas,
        shared=about.shared,
        parameters=(*variant.arguments, *SCRATCH_PARAMETERS),
        scratch=about.global_scratch_size,
        scratch_alignment=about.global_scratch_align,
    )
    return Success(cubin, made.asm["ptx"])


def main() -> None:
    """Answers until the other side closes. What Triton prints goes to standard error, away from the messages."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while (request := read(sys.stdin.buffer)) is not None:
        variant = msgspec.msgpack.decode(request, type=Variant)
        try:
            answer: Success | Failure = compile_variant(variant)
        except Exception as error:
            answer = Failure(f"{type(error).__name__}: {error}")
        write(answers, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
