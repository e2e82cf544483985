"""What the operators of the domain `llmc` compute, for onnx's evaluator: the plug-ins' numpy references.

    ReferenceEvaluator("model.onnx", new_ops=reference_operators())

Comes in: how partial results are summed over ranks. Goes out: classes. Must not know: files, graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper
from onnx.reference.op_run import OpRun

from llmc.builder.interchange.emitter import DOMAIN
from llmc.builder.interchange.operators import CACHE
from llmc.plugins import OPERATORS
from llmc.plugins.operator import KVCache, Operator, StepContext


def _alone(partial: np.ndarray) -> np.ndarray:
    raise ValueError("the model is one rank of several: give reference_operators the sum over all of them")


def reference_operators(all_reduce: Callable[[np.ndarray], np.ndarray] = _alone) -> list[type[OpRun]]:
    """One class for each operator of the domain. `all_reduce(partial) -> sum over ranks` meets the other ranks, whose
    models are evaluated at the same time, in the order of the graph.
    """

    def reduce(self: OpRun, partial: np.ndarray, **_: Any) -> tuple[np.ndarray]:
        return (all_reduce(partial),)

    summed = type("AllReduce", (OpRun,), {"op_domain": DOMAIN, "_run": reduce})
    return [summed, *(_operator(name, OPERATORS[op], writes) for op, (name, writes) in CACHE.items())]


def _operator(name: str, operator: Operator, writes: bool) -> type[OpRun]:
    def run(self: OpRun, *inputs: np.ndarray, **_: Any) -> tuple[np.ndarray, ...]:
        *own, keys, values, query_start, context_len, block_tables = inputs
        attrs = _attrs(operator, {a.name: helper.get_attribute_value(a) for a in self.onnx_node.attribute})
        cache = KVCache(keys.copy(), values.copy()) if writes else KVCache(keys, values)
        context = StepContext(keys.shape[1], query_start, context_len, block_tables, {attrs.layer: cache})
        results = operator.reference(context, attrs, own)
        if operator.name == "latent_cache":  # a row is key, and its first columns are value
            cache.values = cache.keys[..., : attrs.latent]
        return (*results, cache.keys, cache.values) if writes else results

    return type(name, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def _attrs(operator: Operator, given: dict[str, Any]) -> Any:
    """The operator's own attributes from ONNX's: texts are bytes there, and truths numbers."""
    if "key_scales" in given:
        given["kv_scales"] = (tuple(given.pop("key_scales")), tuple(given.pop("value_scales")))
    defaults = {field.name: field.default for field in dataclasses.fields(operator.attrs)}
    for name, value in given.items():
        if isinstance(value, bytes):
            given[name] = value.decode()
        elif isinstance(defaults[name], bool):
            given[name] = bool(value)
    return operator.attrs(**given)
