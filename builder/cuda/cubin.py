"""Cubins: what is kept of one, and what its ELF says of itself: parameters, registers, memory.

Comes in: a cubin's bytes. Goes out: `Cubin`, `Resources`. It is an ELF64 file as `cuobjdump --dump-elf` shows it, whose
`.nv.info` sections hold attributes: format, number, value. Must not know: Triton, how a cubin was made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from llmc.artifacts.errors import PlanError

#: Parameters that Triton adds behind a kernel's own: pointers to scratch memory, null where a kernel needs none.
SCRATCH_PARAMETERS = ("global_scratch", "profile_scratch")

_NOBITS = 8  # an ELF section without bytes in the file
_SIZED = 4  # the format of an attribute whose value is bytes, so many as its number says
_REGISTER_COUNT, _FRAME_SIZE, _REQUIRED_THREADS, _PARAMETER = 0x2F, 0x11, 0x10, 0x17


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel. `parameters`: names in the order in which a launch passes them, SCRATCH_PARAMETERS last.
    A block has 32 * `num_warps` threads; `shared`: bytes of dynamic shared memory it is launched with; grid x counts
    `num_ctas` times. `scratch`: bytes of global scratch a block, `scratch_alignment` theirs.
    """

    code: bytes
    entry: str
    num_warps: int
    num_ctas: int
    shared: int
    parameters: tuple[str, ...]
    scratch: int = 0
    scratch_alignment: int = 1


@dataclass(frozen=True)
class Parameter:
    """Where a parameter lies among the parameter bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Resources:
    """What a kernel says of itself. `registers` a thread; `local`: bytes of a thread's stack, where registers spill to,
    and where sines of large numbers are worked out; `shared`: static bytes of a block; `threads`: of a block.
    """

    entry: str
    parameters: tuple[Parameter, ...]
    registers: int
    local: int
    shared: int
    threads: int


def resources(code: bytes) -> Resources:
    """Of the one kernel in a cubin. Raises PlanError for bytes that are no such thing."""
    try:
        return _resources(code)
    except (struct.error, ValueError, IndexError, StopIteration, UnicodeDecodeError) as error:
        raise PlanError(f"a cubin of {len(code)} bytes is damaged ({error}): build the plan again") from error


def _resources(code: bytes) -> Resources:
    sections = dict(_sections(code))
    entries = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(entries) != 1:
        raise ValueError(f"it has {len(entries)} kernels")
    entry = entries[0]
    own = list(_attributes(sections[f".nv.info.{entry}"][0]))
    parameters = sorted(struct.unpack_from("<IHHI", value) for number, value in own if number == _PARAMETER)
    ordered = sorted((ordinal, offset, word >> 18) for _, ordinal, offset, word in parameters)
    threads = next(struct.unpack_from("<III", value) for number, value in own if number == _REQUIRED_THREADS)
    about = {number: struct.unpack_from("<II", value)[1] for number, value in _attributes(sections[".nv.info"][0])}
    return Resources(
        entry=entry,
        parameters=tuple(Parameter(offset, size) for _, offset, size in ordered),
        registers=about[_REGISTER_COUNT],
        local=about[_FRAME_SIZE],
        shared=sections.get(f".nv.shared.{entry}", (b"", 0))[1],
        threads=threads[0] * threads[1] * threads[2],
    )


def _sections(code: bytes) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Each section's name, bytes and size."""
    if code[:5] != b"\x7fELF\x02":
        raise ValueError("it is no ELF64 file")
    (start,) = struct.unpack_from("<Q", code, 0x28)
    width, count, names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, start + number * width) for number in range(count)]
    text = headers[names][4]
    for name, kind, _, _, offset, size in headers:
        label = code[text + name : code.index(b"\0", text + name)].decode()
        yield label, (b"" if kind == _NOBITS else code[offset : offset + size], size)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and value of each attribute that has bytes."""
    at = 0
    while at + 4 <= len(data):
        layout, number, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if layout == _SIZED:
            yield number, data[at : at + size]
            at += size
