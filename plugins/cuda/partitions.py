"""Decode steps over partitions of the context: how a context is divided, and the launch that joins the parts.

Comes in: the largest context, widths. Goes out: numbers, temporaries and `CudaCall`s. Must not know: builder, runtime.

Partitions are of absolute positions and joined in order, so that a sequence's values depend on no other sequence.

Tactics of attention name a blocking for decode steps, `decode`, and for steps of any mixture, `mixed` (of
paged_attention `mixed_wide` where heads are wider than 64). Each has the `keys` that a tile looks at together and
`rows` of queries in it (a decode's rows are the heads that share a KV head; both are fewer where heads are wide),
`warps`, and `stages`: tiles of keys that are under way at once. A decode has the least `partition`, in positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.plugins.cuda.call import Arg, CudaCall, CudaEnv, Product, StepArray, Temporary
from llmc.plugins.cuda.rows import power_of_two

#: A context is divided into at most so many parts.
_MOST_PARTITIONS = 32


@dataclass(frozen=True)
class Partitions:
    """`size` positions each; a query sees at most `count` of them. `visible`: how many keys a query sees at most, None:
    all before it.
    """

    size: int
    count: int
    visible: int | None

    def axis(self) -> tuple[Product, ...]:
        """The grid's axis over the parts."""
        return (Product(("max_context",), self.size) if self.visible is None else Product((self.count,)),)

    def constexprs(self, heads: int) -> dict[str, int]:
        """What both kernels are told."""
        return {"HEADS": heads, "PARTITION": self.size, "PARTITIONS": self.count}

    def between(self, heads: int, width: int) -> dict[str, Arg | None]:
        """What lies between the two launches; None for each where one part is all."""
        shape: tuple[int | str, ...] = ("num_seqs", heads, self.count)
        sizes = {"partial": (*shape, width), "partial_most": shape, "partial_total": shape}
        if self.count == 1:
            return dict.fromkeys(sizes)
        return {name: Temporary(name, "f32", (Product(size),)) for name, size in sizes.items()}


def partitions(env: CudaEnv, tactics: Mapping[str, int], visible: int | None = None) -> Partitions:
    """Of the largest context that the plan serves; the tactic `partition` is the least size."""
    size = max(tactics["partition"], power_of_two(-(-env.max_context // _MOST_PARTITIONS)))
    count = -(-env.max_context // size)
    if visible is not None:
        count = min(count, -(-(visible - 1) // size) + 1)
    return Partitions(size, count, visible)


def combine(
    parts: Partitions,
    heads: int,
    width: int,
    y: Mapping[str, Arg],
    sinks: Arg | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> CudaCall:
    """The launch that joins what lies `between`; `y`: the output and its stride."""
    between = {name: arg for name, arg in parts.between(heads, width).items() if arg is not None}
    block = power_of_two(width)
    args: dict[str, Arg] = {**between, **y, "context_len": StepArray("context_len")}
    if sinks is not None:
        args["sinks"] = sinks
    return CudaCall(
        kernel="paged_attention.kernels:combine",
        args=args,
        constexprs={
            **({"sinks": None} if sinks is None else {}),
            **parts.constexprs(heads),
            "V_WIDTH": width,
            "V_BLOCK": block,
            "WINDOW": window,
            "CHUNK": chunk,
        },
        grid=((Product(("num_seqs",)),), (Product((heads,)),)),
        num_warps=max(1, block // 128),
    )
