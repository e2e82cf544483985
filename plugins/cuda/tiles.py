"""How matrix products of the cuda targets are cut into tiles: the target's tactics, fitted to a product.

Comes in: sizes and dtypes of a product, the tactics of its operator. Goes out: `Tiles`. Must not know: builder,
runtime, operators, Triton.

Tactics name a blocking for each class of products: `wide` (many rows), `skinny` (a decode step's few rows, where
reading the weights is all the work; `rows` is the most that a tile takes), `int4` (many rows, INT4 weights: unpacking
takes registers) and `exact` (f32 weights, without tensor cores). Each has `rows` and `columns` of a tile of results,
`depth_bytes` of a weight's row that are read in one step, `warps`, and `stages`: steps whose numbers are under way at
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.artifacts.types import NUMPY_DTYPES, Dim
from llmc.plugins.cuda.call import CudaEnv, Symbol
from llmc.plugins.cuda.rows import power_of_two

#: Bytes of shared memory that a block may have, by architecture (CUDA C++ Programming Guide, compute capabilities).
SHARED_MEMORY: Mapping[int, int] = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: Rows up to which a product is skinny.
SKINNY_ROWS = 64
#: Rows of a tile, at most, where x is converted to fewer bits on the way, which takes registers.
CONVERTED_ROWS = 64
#: Tensor cores take tiles of at least so many rows, and of so many bytes along k.
LEAST_ROWS, LEAST_DEPTH_BYTES = 16, 32


@dataclass(frozen=True)
class Tiles:
    """A tile of `rows` by `columns` results, `depth` numbers of k in a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def rows_argument(rows: Dim) -> int | Symbol:
    """How many rows there are, for a kernel."""
    return rows if isinstance(rows, int) else Symbol(rows)


def most_rows(rows: Dim, env: CudaEnv) -> int:
    """How many rows there can be."""
    return rows if isinstance(rows, int) else {"T": env.tokens[1], "S": env.max_sequences}[rows]


def skinny(rows: Dim, env: CudaEnv) -> bool:
    """Whether the product is always of few rows: those of a decode step are, whatever its bucket."""
    return env.decode or most_rows(rows, env) <= SKINNY_ROWS


def tiles(rows: Dim, depth: int, x: str, weights: Sequence[str], env: CudaEnv) -> Tiles:
    """For a product over `depth` numbers of an x stored as `x` with as many matrices at once as `weights` has dtypes:
    those share the columns of a tile. As many stages as fit the shared memory.
    """
    few, weight = skinny(rows, env), weights[0]
    multiplied = "bf16" if weight == "u4" else weight
    item = NUMPY_DTYPES[multiplied].itemsize
    wide = {"u4": "int4", "f32": "exact"}.get(weight, "wide")
    tactic = env.tactics["skinny" if few and wide != "exact" else wide]
    height = tactic["rows"]
    if few:
        height = min(height, max(LEAST_ROWS, power_of_two(most_rows(rows, env))))
    elif NUMPY_DTYPES[x].itemsize > item:
        height = min(height, CONVERTED_ROWS)
    columns = max(LEAST_ROWS, tactic["columns"] // len(weights))
    step = _step(depth, tactic["depth_bytes"] // item, max(LEAST_DEPTH_BYTES // item, LEAST_ROWS))
    stage = step * (height * NUMPY_DTYPES[x].itemsize + len(weights) * columns * item)
    converted = 0 if x == multiplied else 2 * step * (height + len(weights) * columns)
    stages = max(1, min(tactic["stages"], (SHARED_MEMORY[env.sm] - converted) // stage))
    return Tiles(height, columns, step, tactic["warps"], stages)


def _step(depth: int, most: int, least: int) -> int:
    """`most`, or a half or quarter of it that divides the depth; no more than the depth's next power of two."""
    most = max(least, min(most, power_of_two(depth)))
    return next((step for step in (most, most // 2, most // 4) if step >= least and depth % step == 0), most)
