"""How the cpu target calls a scan of state space models: `ssd_scan` and `selective_scan` differ in name and shape only.

Comes in: name, shape and state. Goes out: `CpuCall`. Must not know: builder, runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc.plugins.cpu.call import CpuCall, KernelEnv, Literal, Pointer, RowStride


def scan_call(name: str, shape: Sequence[int], skip: bool, state: int, env: KernelEnv) -> CpuCall:
    """Inputs are x, B, C and dt, whose rows may lie apart, A, and D where there is a `skip`. `shape`: the kernel's
    template arguments. Needs `env.state_offsets[state]`.
    """
    return CpuCall(
        header=f"plugins/{name}/cpu.h",
        function=f"{name}<{', '.join(map(str, shape))}>",
        args=(
            *(Pointer("in", i) for i in range(4)),
            *(RowStride("in", i) for i in range(4)),
            Pointer("in", 4),
            Pointer("in", 5) if skip else Literal("nullptr"),
            Pointer("out", 0),
            *env.state_place(state),
        ),
        strided=frozenset(Pointer("in", i) for i in range(4)),
    )
