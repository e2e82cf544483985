"""Mixtures of experts: traced, fused, quantized and divided among ranks, interpreted, beside Hugging Face."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.pipeline import Compiled, CompileOptions, run
from llmc.builder.trace import Traced, trace_model
from llmc.builder.trace.expert_loop import grouped_forward, loops_over_experts
from llmc.builder.trace.experts_hook import _experts
from llmc.tiny import tiny_config
from llmc.tiny_model import random_model
from tests.unit.builder.weights_of import model_tensors, params_of

torch.set_num_threads(1)

#: softmax before and after the choice, sigmoid with correction bias and groups, sparse mixer, shared experts, and rows
#: that are weighted before their experts.
FAMILIES = ("mixtral", "granitemoe", "glm4_moe", "phimoe", "qwen2_moe", "ernie4_5_moe", "llama4_text")
#: Its experts are a loop in Python, and its tiny model has one KV head, which two ranks cannot divide.
LOOPING = "dbrx"
FIRST = [[5 + i * 37 % 290 for i in range(13)], [9], [7 + i * 31 % 280 for i in range(11)]]
SECOND = [[11], [12], [13, 14]]


@cache
def traced(family: str) -> tuple[Any, Traced]:
    """A tiny model and its trace."""
    config = tiny_config(family)
    model = random_model(config)
    return model, trace_model(config, {name: tuple(v.shape) for name, v in model.state_dict().items()})


@cache
def expected(family: str) -> np.ndarray:
    """The logits of both steps' tokens, each prompt alone, in the order of the steps."""
    model, _ = traced(family)
    with torch.inference_mode():
        rows = [
            model(torch.tensor([a + b]), use_cache=False).logits[0].numpy() for a, b in zip(FIRST, SECOND, strict=True)
        ]
    before = [row[: len(a)] for row, a in zip(rows, FIRST, strict=True)]
    return np.concatenate([*before, *(row[len(a) :] for row, a in zip(rows, FIRST, strict=True))])


def computed(family: str, compiled: Compiled) -> np.ndarray:
    """What the ranks' graphs give for the two steps."""
    model, result = traced(family)
    params = params_of(model_tensors(model, result.buffers))
    batches = [Batch(g, [len(a) + len(b) for a, b in zip(FIRST, SECOND, strict=True)]) for g in compiled.graphs]
    steps = []
    for tokens in (FIRST, SECOND):
        prepared = [batch.step(tokens, rows="all") for batch in batches]
        ranks = run_ranks(compiled.graphs, prepared[0][0], [context for _, context in prepared], params)
        shards = [outputs[0].reshape(-1, outputs[0].shape[-1]) for outputs in ranks]
        steps.append(np.concatenate(shards, axis=-1) if len({v[0] for v in compiled.vocab}) > 1 else shards[0])
    return np.concatenate(steps)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray((a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)))


@pytest.mark.parametrize(("family", "tp"), [*((name, tp) for name in FAMILIES for tp in (1, 2)), (LOOPING, 1)])
def test_computes_what_hugging_face_computes(family: str, tp: int) -> None:
    compiled = run(traced(family)[1].graph, CompileOptions(tp=tp))
    have, want = computed(family, compiled), expected(family)
    assert cosine(have, want).min() >= 0.999999
    assert (have.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_routes_in_one_launch_and_has_two_for_its_experts(family: str) -> None:
    compiled = run(traced(family)[1].graph, CompileOptions(tp=2))
    for graph in compiled.graphs:
        layers = {node.path.rpartition(".experts.")[0] for node in graph if node.op == "grouped_linear"}
        assert layers
        assert sum(node.op == "grouped_linear" for node in graph) == 2 * len(layers)
        assert sum(node.op == "rowwise" for node in graph) == len(layers)
        assert all(node.attrs.gated != node.attrs.combine for node in graph if node.op == "grouped_linear")
        assert all(node.attrs.all_reduce == node.attrs.combine for node in graph if node.op == "grouped_linear")


@pytest.mark.parametrize(("precision", "least"), [("bf16", 0.999), ("fp8", 0.97)])
def test_lower_precisions_stay_close_and_route_alike(precision: str, least: float) -> None:
    family = "mixtral"
    compiled = run(traced(family)[1].graph, CompileOptions(precision=precision, tp=2, fp8_activations="token"))
    assert least <= np.median(cosine(computed(family, compiled), expected(family))) < 0.999999
    types = compiled.graphs[0].types()
    routers = [node for node in compiled.graphs[0] if node.op == "linear" and node.path.endswith(".gate")]
    assert routers
    assert all(types[node.inputs[1]].dtype == "f32" for node in routers)


def test_experts_that_are_stored_otherwise_are_refused_by_name() -> None:
    module = torch.nn.Module()
    module.has_gate, module.has_bias, module.is_transposed = True, False, False
    with pytest.raises(UnsupportedError, match="Module has no parameter gate_up_proj with 3 axes"):
        _experts(module, torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1))


class Looping(torch.nn.Module):
    """Experts that are no experts of transformers' interface; `last` is what becomes of the last one's rows, `chosen`
    which of its tokens an expert takes.
    """

    def __init__(self, last: Any = None, between: Any = torch.relu, chosen: Any = lambda tokens: tokens) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.empty(3, 6, 4, device="meta"))
        self.down = torch.nn.Parameter(torch.empty(3, 4, 6, device="meta"))
        self.last, self.between, self.chosen = last, between, chosen

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        total = torch.zeros_like(hidden_states)
        mask = torch.nn.functional.one_hot(top_k_index, 3).permute(2, 1, 0)
        for expert in range(3):
            slot, token = (self.chosen(places) for places in torch.where(mask[expert]))
            if not token.numel():
                continue
            rows = self.between(torch.nn.functional.linear(hidden_states[token], self.up[expert]))
            rows = torch.nn.functional.linear(rows, self.down[expert])
            if expert == 2 and self.last is not None:
                rows = self.last(rows)
            total.index_add_(0, token, rows * top_k_weights[token, slot, None])
        return total


def looped(module: torch.nn.Module) -> torch.Tensor:
    assert loops_over_experts(module)
    return grouped_forward(module)(
        torch.empty(5, 4, device="meta"),
        torch.empty(5, 2, dtype=torch.int64, device="meta"),
        torch.empty(5, 2, device="meta"),
    )


def test_a_loop_over_experts_becomes_grouped_linears() -> None:
    module = Looping()
    assert looped(module).shape == (5, 4)
    assert isinstance(module.up, torch.nn.Parameter)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Looping(last=torch.neg), "its first and its last expert compute different things"),
        (Looping(between=lambda rows: rows.sum(0)), "its experts compute sum of rows"),
        (Looping(between=lambda rows: rows.chunk(2, -1)[0]), "its experts compute chunk of rows"),
        (Looping(chosen=lambda tokens: tokens[:2]), "its experts compute getitem of rows"),  # as a capacity does
        (Looping(chosen=lambda tokens: tokens.flip(0)), "its experts compute getitem of rows"),
        (Looping(between=lambda rows: rows.softmax(0)), "its experts compute softmax of rows"),
        (
            Looping(between=lambda rows: rows.softmax(1)),
            "its experts compute softmax of rows",
        ),  # 1: the token's choices
    ],
)
def test_a_loop_that_is_not_understood_is_refused(module: torch.nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"Looping cannot be compiled: {reason}"):
        looped(module)
