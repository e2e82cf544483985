"""Programs as C++: one translation unit per token range, and headers with the constants that `entry.cpp` works with.

Comes in: `CpuLowered`. Goes out: file name -> text, the same for the same input. Must not know: single operators, g++.

A step is a list of kernel calls with a barrier after each. Kernels are templates that the layers of a model share, so a
range compiles as fast with thirty layers as with one.
"""

from __future__ import annotations

from llmc.artifacts.types import NUMPY_DTYPES, TensorType
from llmc.builder.cpu.program import CpuLowered, CpuRank, Launch, Place, RangeProgram
from llmc.builder.ir import Node
from llmc.plugins.cpu.call import C_TYPES, Pointer, RowStride, render

#: What every unit includes, and what `entry.cpp` includes beside it: the steps do not depend on it.
HEADER, LIMITS = "engine.h", "limits.h"

#: Space -> the C++ expression of its first byte.
_BASES = {
    "weights": "w",
    "shared": "s",
    "arena": "a",
    "ids": "c.step->ids",
    "positions": "c.step->positions",
    "rows": "c.step->rows",
    "logits": "c.step->logits",
}


def emit(lowered: CpuLowered, rank: int) -> dict[str, str]:
    """The sources of one rank: two headers, and `step_<i>.cpp` for each token range."""
    program = lowered.programs[rank]
    files = {HEADER: _header(lowered, program), LIMITS: _limits(lowered, program)}
    for number, code in enumerate(program.ranges):
        files[f"step_{number}.cpp"] = _step(lowered, program, code, number)
    return files


def _title(lowered: CpuLowered, program: CpuRank) -> str:
    graph = program.graph
    return f"// {graph.name}, rank {graph.rank} of {graph.tp}, for {lowered.target}. Written by llmc."


def _header(lowered: CpuLowered, program: CpuRank) -> str:
    profile = lowered.profile
    rows = [
        f"    {{{r.tokens.min}, {r.tokens.max}, {r.rows}, {len(r.launches)}, step_{i}}},"
        for i, r in enumerate(program.ranges)
    ]
    numbers = {
        "kMaxSequences": profile.max_num_seqs,
        "kMaxContext": profile.max_seq_len,
        "kBlockSize": profile.block_size,
        "kSharedScratch": program.scratch.shared,
        "kThreadScratch": program.scratch.per_thread,
        "kSlotBytes": lowered.slot_bytes,
        "kWeightsBytes": program.weights.nbytes,
        "kSharedBytes": lowered.shared.nbytes,
        "kArenaBytes": program.arena_bytes,
        "kBlockBytes": program.kv_block_bytes,
        "kStateSlotBytes": program.state_slot_bytes,
    }
    lines = [
        _title(lowered, program),
        "#pragma once",
        '#include "plugins/cpu/runtime.h"',
        "namespace llmc {",
        f"constexpr int kRank = {program.rank}, kRanks = {program.graph.tp};",
        *(f"constexpr int64_t {name} = {value};" for name, value in numbers.items()),
        *(f"void step_{i}(const Ctx& c, int tid);" for i in range(len(rows))),
        "// Steps of min..max tokens with up to `rows` wanted rows, in so many launches.",
        "struct Range {",
        "  int min, max, rows, launches;",
        "  void (*step)(const Ctx&, int);",
        "};",
        "constexpr Range kRanges[] = {",
        *rows,
        "};",
        "}  // namespace llmc",
    ]
    return "\n".join(lines) + "\n"


def _limits(lowered: CpuLowered, program: CpuRank) -> str:
    ids = f"constexpr int32_t kVocabulary = {lowered.vocab_size};  // token ids are below it"
    return "\n".join([_title(lowered, program), "#pragma once", "namespace llmc {", ids, "}  // namespace llmc"]) + "\n"


def _step(lowered: CpuLowered, program: CpuRank, code: RangeProgram, number: int) -> str:
    tokens = code.tokens
    headers = sorted({launch.call.header for launch in code.launches})
    preludes = dict.fromkeys(launch.call.prelude for launch in code.launches if launch.call.prelude)
    used = sorted({p.offset for launch in code.launches for p in launch.inputs if p.space == "const"})
    body = [_launch(program, launch) for launch in code.launches]
    # Whoever runs the step meets all threads once more when it returns.
    text = body[0] + "".join(f"\n  c.next(tid, {i});\n{call}" for i, call in enumerate(body[1:], 1))
    lines = [
        _title(lowered, program),
        f"// Steps of {tokens.min}..{tokens.max} tokens, tuned for {tokens.opt}; {len(body)} launches.",
        '#include "engine.h"',
        *(f'#include "{header}"' for header in headers),
        "",
        "namespace llmc {",
        *preludes,
        *(_constant(program.constants[i], i) for i in used),
        "",
        # A list of calls gains nothing from being optimized, or from kernels inlined into it, and takes half the time
        # of the compiler. The kernels themselves are not concerned.
        f'__attribute__((optimize("O1"))) void step_{number}(const Ctx& c, int tid) {{',
        "  const uint8_t *w = c.rank->weights, *s = c.rank->shared;",
        "  uint8_t* a = c.rank->arena;",
        f"  const int64_t T = {tokens.min if tokens.min == tokens.max else 'c.step->num_tokens'}, "
        "S = c.step->num_rows;",
        "  (void)w, (void)s, (void)a, (void)T, (void)S;",
        text,
        "}",
        "}  // namespace llmc",
    ]
    return "\n".join(lines) + "\n"


def _constant(node: Node, number: int) -> str:
    if node.type.dtype not in ("f32", "i32", "i64"):
        raise ValueError(f"const %{node.out}: {node.type} has no C++ type")
    values = ", ".join(_number(v, node.type) for v in node.attrs.values)
    return f"alignas(64) static const {C_TYPES[node.type.dtype]} constant_{number}[] = {{{values}}};  // %{node.out}"


def _number(value: float, kind: TensorType) -> str:
    if kind.dtype.startswith("i"):
        return str(int(value))
    number = float(NUMPY_DTYPES["f32"].type(value))
    if number != number:
        return '__builtin_nanf("")'
    if abs(number) == float("inf"):
        return f"{'-' if number < 0 else ''}__builtin_inff()"
    return f"{number.hex()}f"


def _launch(program: CpuRank, launch: Launch) -> str:
    node = launch.node
    results = ", ".join(f"%{name} {kind}" for name, kind in zip(node.outputs, node.types, strict=True))
    comment = f"  // {node.path or node.op}: {node.op}({', '.join('%' + n for n in node.inputs)}) -> {results}"
    symbols = {"T": "T", "S": "S"}
    given = (render(arg, lambda a: _value(a, program, launch), symbols) for arg in launch.call.args)
    args = ", ".join(["c", "tid", *given])
    return f"{comment}\n  {launch.call.function}({args});"


def _value(arg: Pointer | RowStride, program: CpuRank, launch: Launch) -> str:
    places = launch.inputs if arg.side == "in" else launch.outputs
    if isinstance(arg, RowStride):
        return f"int64_t({places[arg.index].stride})"
    names = launch.node.inputs if arg.side == "in" else launch.node.outputs
    return _pointer(places[arg.index], f"{'const ' if arg.side == 'in' else ''}{_element(program, names[arg.index])}")


def _element(program: CpuRank, name: str) -> str:
    return C_TYPES[program.types[name].dtype]


def _pointer(place: Place, element: str) -> str:
    if place.space == "const":
        return f"constant_{place.offset}"
    base = _BASES[place.space]
    if base.startswith("c.step"):
        size = NUMPY_DTYPES["f32"].itemsize
        return f"{base} + {place.offset // size}" if place.offset else base
    return f"({element}*)({base} + {place.offset})"
