"""rowwise: a small program over each row, in one launch: softmax, choice of the best, comparison, renormalisation.

Comes in: rows, weights that are the same for every row, and a program. Goes out: its results, a row each. Must not
know: builder, runtime, what the program is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.artifacts.types import TensorType
from llmc.plugins.operator import Operator, StepContext
from llmc.plugins.rowwise.program import is_rows, parse, row_types, run


@dataclass(frozen=True)
class Attrs:
    """Step n of `steps` makes v<n> from earlier values and from inputs: i<m> where input m has a row for each token,
    w<m> where it is the same for all. `results` names the values that are returned.

    A step is an elementwise formula, numbers included, whose operands broadcast ("exp(sub(i0, v0))"), or one of
    reduce_mean|reduce_sum|reduce_max(x), topk(x, k), bottomk(x, k), gather(x, index), scatter(x, index, y),
    slice(x, axis, start, stop, step), concat(x, y, ...), reshape(x, sizes...), fill(x, sizes...). Reductions, choices
    and concat work on the last axis. Shapes are those of a row: the first axis, T or S, is never named.
    """

    steps: tuple[str, ...]
    results: tuple[str, ...]


def infer(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Rows f32|i32[T,...] (or S), weights f32|i32[...] -> an f32|i32[T,...] for each result."""
    symbols = {t.shape[0] for t in types if is_rows(t)}
    if len(symbols) != 1 or any(t.dtype not in ("f32", "i32") for t in types):
        raise ValueError(f"inputs are {', '.join(map(str, types))}; expected f32 or i32, rows over T or over S")
    known = row_types(parse(attrs.steps), types)
    missing = [name for name in attrs.results if name not in known]
    if missing or not attrs.results:
        raise ValueError(f"results {', '.join(missing) or '()'} are no values of the program")
    outputs = [known[name] for name in attrs.results]
    if any(kind.dtype == "bool" for kind in outputs):
        raise ValueError("a result is a truth value; only f32 and i32 can be returned")
    return tuple(TensorType(kind.dtype, (*symbols, *kind.shape)) for kind in outputs)


def reference(context: StepContext, attrs: Attrs, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Each function in float64, each result rounded to float32."""
    calls = parse(attrs.steps)
    read = {name for call in calls for name in call.values()} | set(attrs.results)
    named = {name: inputs[int(name[1:])] for name in read if name[0] in "iw"}
    count = next(len(value) for name, value in named.items() if name[0] == "i")
    known = run(calls, named, count)
    return tuple(np.ascontiguousarray(known[name]) for name in attrs.results)


OPERATOR = Operator("rowwise", Attrs, infer, reference, rtol=2e-5, atol=1e-6)
