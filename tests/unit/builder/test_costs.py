"""What attention reads and computes: every pair of a token and a position that its mask lets through, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.artifacts.schema import KVLayer
from llmc.artifacts.types import TensorType
from llmc.builder.ir import Graph, Node
from llmc.builder.page.costs import Cost, Step, graph_costs, kv_token_bytes
from llmc.plugins import latent_attention, paged_attention, rope_cache

#: A prompt, a chunk behind others, a token, and several sequences.
STEPS = [Step(40, 1, 40), Step(13, 1, 90), Step(1, 1, 77), Step(12, 3, 50, sequences=3)]
SEEN = [{}, {"window": 7}, {"chunk": 16}, {"window": 5, "chunk": 16}, {"window": 200}, {"chunk": 200}]


def costs(attention: Any, step: Step, dtype: str, *others: tuple[str, Any]) -> list[Cost]:
    """Of nodes of layer 3 that read nothing but the cache."""
    op = "latent_attention" if isinstance(attention, latent_attention.Attrs) else "paged_attention"
    kind = TensorType("f32", ("T", 1))
    nodes = tuple(Node(op, (), attrs, (f"y{i}",), (kind,)) for i, (op, attrs) in enumerate([(op, attention), *others]))
    graph = Graph("g", nodes, ("y0",))
    kv_token = kv_token_bytes(graph, [KVLayer(3, 1, 1, dtype, 0, 0)])
    return [cost for _, cost in graph_costs(graph, step, kv_token)]


@pytest.mark.parametrize("options", SEEN, ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_attention_costs_what_it_sees(step: Step, options: dict[str, int]) -> None:
    each = step.tokens // step.sequences
    pairs = {
        (token, key)
        for token in range(step.context - each, step.context)
        for key in range(token + 1)
        if token - key < options.get("window", step.context)
        and ("chunk" not in options or token // options["chunk"] == key // options["chunk"])
    }
    attrs = paged_attention.Attrs(3, 6, 2, 24, 0.2, v_dim=40, **options)
    (found,) = costs(attrs, step, "bf16")
    assert found.flops == step.sequences * len(pairs) * 6 * (2 * 24 + 2 * 40)
    assert found.kv == step.sequences * len({key for _, key in pairs}) * 2 * (24 + 40) * 2


def test_the_cache_is_written_as_wide_as_it_is() -> None:
    step = Step(4, 1, 10)
    write = ("rope_cache", rope_cache.Attrs(3, 6, 2, 24, v_dim=40))
    _, written = costs(paged_attention.Attrs(3, 6, 2, 24, 0.2, v_dim=40), step, "f8e4m3", write)
    assert written.kv == 4 * 2 * (24 + 40)
    (latent,) = costs(latent_attention.Attrs(3, 6, 32, 8, 0.2), step, "f32")
    assert latent.kv == 10 * (32 + 8) * 4
    assert latent.flops == 2 * (7 + 8 + 9 + 10) * 6 * (2 * 32 + 8)
