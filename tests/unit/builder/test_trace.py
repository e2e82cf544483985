"""Each family's traced and canonical graph, interpreted on ragged batches, gives Hugging Face's logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.builder.interpreter import Batch, run
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import ALL, attrs_of
from llmc.builder.passes.canonicalize import canonicalize
from llmc.builder.trace import Traced, trace_model
from llmc.tiny import tiny_config as any_config
from tests.models import FAMILIES, LATENT_FAMILIES, RECURRENT_FAMILIES, VOCAB, WINDOW, tiny_config, tiny_model
from tests.unit.builder.weights_of import model_tensors, params_of

torch.set_num_threads(1)


@functools.cache
def traced(family: str) -> tuple[Any, Traced, Graph]:
    """A family's model, its trace and its canonical graph."""
    model = tiny_model(family)
    result = trace_model(tiny_config(family))
    return model, result, canonicalize(result.graph)[0]


def graph_of(family: str, form: str) -> Graph:
    _, result, canonical = traced(family)
    return result.graph if form == "traced" else canonical


@functools.cache
def prompts() -> list[list[int]]:
    """Three prompts, two of them longer than the sliding window, and their continuations."""
    rng = np.random.default_rng(7)
    return [rng.integers(6, VOCAB, count).tolist() for count in (2 * WINDOW + 5, 6, WINDOW + 3)]


@functools.cache
def expected(family: str) -> list[np.ndarray]:
    """Hugging Face's logits [tokens, V] of each prompt alone, eager attention, float32."""
    model, _, _ = traced(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [model(torch.tensor([p]), use_cache=False).logits[0].numpy() for p in prompts()]


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    cosine = (got * wanted).sum(-1) / (np.linalg.norm(got, axis=-1) * np.linalg.norm(wanted, axis=-1))
    assert cosine.min() >= 0.999999
    assert np.abs(got - wanted).max() <= 2e-4


@pytest.mark.parametrize("form", ["traced", "canonical"])
@pytest.mark.parametrize("family", FAMILIES + LATENT_FAMILIES + RECURRENT_FAMILIES)
def test_ragged_prefill(family: str, form: str) -> None:
    model, result, _ = traced(family)
    graph = graph_of(family, form)
    batch = Batch(graph, [len(p) for p in prompts()])
    (logits,) = run(graph, *batch.step(prompts(), rows="all"), params_of(model_tensors(model, result.buffers)))
    assert_close(logits.reshape(-1, VOCAB), np.concatenate(expected(family)))


@pytest.mark.parametrize("form", ["traced", "canonical"])
@pytest.mark.parametrize("family", FAMILIES + LATENT_FAMILIES + RECURRENT_FAMILIES)
def test_chunks_and_decodes_through_the_cache(family: str, form: str) -> None:
    """The first prompt comes in chunks, the second token by token, the third joins late; all mixed in one step."""
    model, result, _ = traced(family)
    graph = graph_of(family, form)
    params = params_of(model_tensors(model, result.buffers))
    cuts = [[0, 9, 10, 11, len(prompts()[0])], [0, 3, 4, 5, 6], [0, 0, 7, 7, len(prompts()[2])]]
    batch = Batch(graph, [len(p) for p in prompts()], block_size=3, seed=1)
    for step in range(4):
        tokens = [p[c[step] : c[step + 1]] for p, c in zip(prompts(), cuts, strict=True)]
        (logits,) = run(graph, *batch.step(tokens), params)
        ends = [c[step + 1] - 1 for c, own in zip(cuts, tokens, strict=True) if own]
        active = [wanted for wanted, own in zip(expected(family), tokens, strict=True) if own]
        assert_close(logits.reshape(-1, VOCAB), np.stack([w[e] for w, e in zip(active, ends, strict=True)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_canonical_form(family: str) -> None:
    """No batch axis, no transposes, tokens first, and the text reads back as the same graph."""
    graph = graph_of(family, "canonical")
    graph.validate(ALL)
    assert parse_graph(str(graph), attrs_of) == graph
    assert not [node for node in graph if node.op in ("transpose", "broadcast", "matmul")]
    kinds = graph.types()
    assert [str(node.type) for node in graph if node.op == "input"] == ["i32[T]", "i32[T]", "i32[S]"]
    assert str(kinds[graph.outputs[0]]) == f"f32[S,{VOCAB}]"
    for name, kind in kinds.items():
        assert kind.rank <= 3, name
        assert not any(isinstance(dim, str) for dim in kind.shape[1:]), name
    for node in graph:
        if node.op == "attention":
            assert [kinds[i].rank for i in node.inputs] == [3, 3, 3]
        if node.op == "reduce":
            assert (node.attrs.axis, node.attrs.keepdim) == (-1, True)
    keys = [(n.op, n.inputs, n.attrs, n.types) for n in graph]
    assert len(set(keys)) == len(keys), "two nodes compute the same"
    assert canonicalize(graph)[0] == graph


@pytest.mark.parametrize("family", FAMILIES + LATENT_FAMILIES)
def test_traced_text_and_launches(family: str) -> None:
    _, result, _ = traced(family)
    assert parse_graph(str(result.graph), attrs_of) == result.graph
    assert result.eager_launches_per_layer >= 15
    assert result.eager_launches >= 2 * result.eager_launches_per_layer


def test_launches_are_counted_by_hand() -> None:
    """GPT-2 by layer: 2 norms, 4 Conv1D, 1 attention, 2 residual additions, 8 elementwise operators of its GELU."""
    assert traced("gpt2")[1].eager_launches_per_layer == 17


def test_module_paths_and_recipes() -> None:
    graph = graph_of("gpt2", "canonical")
    linears = {node.path: node for node in graph if node.op == "linear"}
    weight = graph.producers()[linears["transformer.h.1.attn.c_attn"].inputs[1]]
    assert weight.attrs.recipe == "transpose(load('transformer.h.1.attn.c_attn.weight'))"
    head = graph.producers()[linears["lm_head"].inputs[1]]
    assert head.attrs.recipe == "load('transformer.wte.weight')"


def test_windows_and_softcaps_reach_the_attention() -> None:
    def attrs(family: str) -> list[Any]:
        return [node.attrs for node in graph_of(family, "canonical") if node.op == "attention"]

    assert [(a.layer, a.window, a.softcap) for a in attrs("gemma2")] == [(0, WINDOW, 3.0), (1, None, 3.0)]
    assert [a.window for a in attrs("mistral")] == [WINDOW, WINDOW]
    assert [a.window for a in attrs("llama")] == [None, None]


def test_buffers_have_the_values_of_the_model() -> None:
    model, result, _ = traced("phi3")
    (name,) = result.buffers
    np.testing.assert_array_equal(result.buffers[name], model.get_buffer(name).numpy())


# -- models that no family has: llama with another function between its projections


def _with_forward(monkeypatch: pytest.MonkeyPatch, module: str, cls: str, forward: Callable[..., Any]) -> None:
    import importlib

    monkeypatch.setattr(
        getattr(importlib.import_module(f"transformers.models.llama.{module}"), cls), "forward", forward
    )


def _mlp(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(change(self.gate_proj(x)) * self.up_proj(x))

    return forward


F = torch.nn.functional


def _twice_and_again(x: torch.Tensor) -> torch.Tensor:
    """All tokens, then all of them again with other factors: copies stand before tokens in one axis."""
    rows = x[0].repeat(3, 1) * torch.stack([x[0, :, 0], x[0, :, 1], x[0, :, 2]]).reshape(-1, 1)
    return (rows.relu().view(3, -1, 100) * rows.reshape(3, -1, 100)).sum(0)[None]


def _written_over(x: torch.Tensor) -> torch.Tensor:
    """Entries and every third or fifth column of a copy replaced, the second time also what was new the first time."""
    rows = x.unflatten(-1, (4, 25)).clone()
    rows[:, :, 2] = -x[..., :25]
    rows[..., 1:20:3] = rows[:, :, 2:3, 1:20:3] * 2.0
    rows[..., 2::5] = x[..., None, :5]
    return rows.flatten(2)


def _mixed(states: torch.Tensor) -> torch.Tensor:
    """Four states [4,1,T,25] mixed by numbers of each token, the first of them normed: an axis that is stored last."""
    mixed = (states.permute(1, 2, 3, 0) @ states[0, ..., :16].unflatten(-1, (4, 4))).permute(3, 0, 1, 2) + states
    first = mixed[0] * torch.rsqrt(mixed[0].square().mean(-1, keepdim=True) + 1e-5)
    return torch.cat([first, *mixed[1:3], mixed.mean(0) / (1 + mixed.mean(0).square().mean(-1, keepdim=True))], -1)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place": lambda x: x.clone().mul_(2.0).add_(1.0),
    "scaled sums": lambda x: torch.add(x, x.tanh(), alpha=0.5) - torch.rsub(x.abs(), 2.0) / 3,
    "softplus": F.softplus,
    "softplus of beta": lambda x: F.softplus(x, beta=2.0),
    "mish": lambda x: x * F.softplus(x).tanh(),
    "elu": F.elu,
    "leaky relu": F.leaky_relu,
    "clamp": lambda x: x.clamp(-0.5, 0.7) + x.clamp(min=0.1) + F.hardtanh(x) + F.relu6(x),
    "gelus": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "softmax": lambda x: x.softmax(-1) * 100,
    "rms norm": lambda x: F.rms_norm(x, (100,), eps=1e-5),
    "layer norm without weights": lambda x: F.layer_norm(x, (100,)),
    "reductions": lambda x: x - x.mean(-1, keepdim=True) + x.amax(-1, keepdim=True) * x.sum(-1)[..., None],
    "spreads": lambda x: x / x.std(-1, unbiased=False, keepdim=True) + x.var(-1)[..., None] + x.std(-1, keepdim=True),
    "corrected spread": lambda x: x - x.unflatten(-1, (4, 25)).var(2, correction=2).repeat(1, 1, 4),
    "strided slices": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2),
    "pieces": lambda x: torch.cat([x.chunk(4, -1)[2], *x.split([30, 20, 50], -1)[:2], x.split(25, -1)[1]], -1),
    "halves exchanged": lambda x: torch.concatenate([x[..., 50:], x[..., :50]], -1),
    "unbound": lambda x: sum(x.unflatten(-1, (4, 25)).unbind(2)).repeat(1, 1, 4),
    "written over": _written_over,
    "all tokens again": _twice_and_again,
    "repeated": lambda x: x[..., :50].repeat_interleave(2, dim=-1),
    "transposed": lambda x: (x.unflatten(-1, (4, 25)).permute(2, 0, 3, 1) * 2.0).permute(1, 3, 0, 2).flatten(2),
    "mixed axes": lambda x: x.unflatten(-1, (4, 25)).transpose(2, 3).reshape(1, x.shape[1], 100),
    "expanded": lambda x: x[..., :10, None].expand(-1, -1, -1, 10).reshape(1, -1, 100) + x[..., :1].expand_as(x),
    "outer product": lambda x: (x[..., :10, None] @ x[..., None, 10:20]).flatten(2),
    "few terms": lambda x: (x.unflatten(-1, (25, 4)) @ x[..., :16].unflatten(-1, (4, 4))).flatten(2),
    "few terms, first": lambda x: _mixed(torch.stack(x.split(25, -1))),
    "matrix product": lambda x: (x.unflatten(-1, (10, 10)) @ x.unflatten(-1, (10, 10)).transpose(2, 3)).flatten(2),
    "constants of its own": lambda x: x * torch.arange(100, device=x.device).float().exp2().log1p() * torch.tensor(0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_unknown_functions_are_translated(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    _with_forward(monkeypatch, "modeling_llama", "LlamaMLP", _mlp(CHANGES[change]))
    model = tiny_model("llama", num_hidden_layers=1)
    result = trace_model(tiny_config("llama", num_hidden_layers=1))
    with torch.no_grad():
        wanted = model(torch.tensor([prompts()[1]]), use_cache=False).logits[0].numpy()
    for graph in (result.graph, canonicalize(result.graph)[0]):
        batch = Batch(graph, [6])
        (logits,) = run(graph, *batch.step([prompts()[1]], rows="all"), params_of(model_tensors(model, result.buffers)))
        np.testing.assert_allclose(logits.reshape(-1, VOCAB), wanted, rtol=1e-4, atol=1e-4)


# -- what cannot be traced


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.special.i0, r"special_i0.*model\.layers\.0\.mlp.*test_trace\.py:\d+.*no translation"),
        (lambda x: x.cumsum(-1), r"cumsum.*model\.layers\.0\.mlp"),
        (lambda x: x - x.mean(1, keepdim=True), r"mean.*model\.layers\.0\.mlp.*mix tokens"),
        (lambda x: x - x[:, :1], r"slice.*model\.layers\.0\.mlp.*cuts the tokens"),
        (lambda x: x.double().exp().float(), r"model\.layers\.0\.mlp.*float64"),
        (lambda x: x if x.sum() > 0 else -x, "LlamaForCausalLM cannot be traced"),
        (lambda x: x.mask, r"no attribute 'mask' \(modeling_llama\.py:\d+: .*self\.mlp"),
    ],
)
def test_operator_without_translation_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    _with_forward(monkeypatch, "modeling_llama", "LlamaMLP", _mlp(change))
    with pytest.raises(UnsupportedError, match=message):
        trace_model(tiny_config("llama", num_hidden_layers=1))


def test_attention_with_options_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.builder.trace import hook

    query = torch.zeros(1, 2, 3, 4)
    module = type("Attention", (), {"layer_idx": 5})()
    with pytest.raises(UnsupportedError, match=r"Attention of layer 5 passes position_bias"):
        hook._attend(module, query, query, query, None, scaling=1.0, position_bias=torch.zeros(2))
    with pytest.raises(UnsupportedError, match="mask of its own"):
        hook._attend(module, query, query, query, torch.zeros(1, 1, 3, 3))


def test_model_that_does_not_call_the_attention_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None

    _with_forward(monkeypatch, "modeling_llama", "LlamaAttention", forward)
    with pytest.raises(UnsupportedError, match="attention interface"):
        trace_model(tiny_config("llama"))


def test_missing_and_misshapen_tensors_are_named() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in traced("llama")[0].state_dict().items()}
    trace_model(tiny_config("llama"), shapes)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"no tensor {name}"):
        trace_model(tiny_config("llama"), {k: v for k, v in shapes.items() if k != name})
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[3, 72\].*\[100, 72\]"):
        trace_model(tiny_config("llama"), {**shapes, name: (3, 72)})


def test_names_without_the_base_models_prefix() -> None:
    """Older GPT-2 checkpoints store `wte.weight`, not `transformer.wte.weight`."""
    shapes = {n.removeprefix("transformer."): tuple(t.shape) for n, t in traced("gpt2")[0].state_dict().items()}
    recipes = {node.attrs.recipe for node in trace_model(tiny_config("gpt2"), shapes).graph if node.op == "param"}
    assert "load('h.0.ln_1.weight')" in recipes
    assert "load('wte.weight')" in recipes


def test_config_of_no_causal_model() -> None:
    from transformers import CLIPConfig

    with pytest.raises(UnsupportedError, match="clip"):
        trace_model(CLIPConfig())


def test_a_model_that_counts_its_tokens_is_told_their_positions() -> None:
    graph = trace_model(any_config("bart")).graph
    assert any("positions" in node.inputs for node in graph)


def test_a_model_that_is_told_positions_and_counts_is_told_those_of_a_step() -> None:
    """Llama 4 scales the queries of layers without rotation by how many tokens stand before them."""
    graph = canonicalize(trace_model(any_config("llama4_text")).graph)[0]
    kinds = {node.out: node for node in graph}
    (counts,) = (node for node in graph if node.op == "floor")
    while counts.op != "input":
        counts = kinds[counts.inputs[0]]
    assert counts.attrs.name == "positions"


def test_an_empty_rest_of_a_rotated_head_joins_as_nothing() -> None:
    config = tiny_config(
        "phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    )
    graph = trace_model(config).graph
    assert all(dim != 0 for node in graph for kind in node.types for dim in kind.shape)


def test_positions_on_several_axes_that_are_the_same_make_one_table() -> None:
    """Frequencies for images take every third from a table of another axis; of text all tables are the same."""
    traced = trace_model(any_config("qwen3_5_text", head_dim=128)).graph
    assert [node for node in traced if node.op == "slice" and node.path == "model.rotary_emb"]
    rotary = [node.op for node in canonicalize(traced)[0] if node.path == "model.rotary_emb"]
    assert "slice" not in rotary
    assert (rotary.count("cos"), rotary.count("sin"), rotary.count("concat")) == (1, 1, 2)
