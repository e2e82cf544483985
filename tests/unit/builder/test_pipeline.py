"""The whole list of passes on every tested family: each pass checked by the interpreter, launches counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Ranges
from llmc.artifacts.errors import UnsupportedError, UsageError
from llmc.builder import pipeline
from llmc.builder.interpreter import Batch, run_ranks
from llmc.builder.ir import Graph, parse_graph
from llmc.builder.operators import attrs_of
from llmc.builder.pipeline import Compiled, CompileOptions
from llmc.builder.trace import Traced, trace_model
from llmc.builder.verify import Verifier, VerifyError
from tests.models import FAMILIES, tiny_config, tiny_model
from tests.unit.builder.weights_of import model_tensors, params_of

torch.set_num_threads(1)

#: Layer launches of each family; the norms after attention and MLP make Gemma2's ten.
PER_LAYER = {"gemma2": 10.0}
KV_HEADS = {"llama": 3, "gpt2": 4}


@cache
def traced(family: str) -> Traced:
    """The family's tiny model, traced once."""
    return trace_model(tiny_config(family))


@cache
def params(family: str) -> Callable[[str], np.ndarray]:
    """Recipe text -> value."""
    return params_of(model_tensors(tiny_model(family), traced(family).buffers))


def ranges(family: str) -> CalibrationTable:
    """A calibration table whose ranges are wide enough for random weights."""
    names = {node.path for node in traced(family).graph if node.op == "linear"}
    data = CalibrationData("none", "0" * 64, 0, 0, 0)
    return CalibrationTable("0" * 64, "none", "max", data, {name: Ranges(8.0, (1.0,)) for name in names})


@cache
def compiled(family: str, tp: int = 1, precision: str = "fp32", activations: str = "static") -> Compiled:
    """The family's fused graphs, every pass verified."""
    table = ranges(family) if precision == "fp8" and activations == "static" else None
    verifier = Verifier(params(family))
    options = CompileOptions(precision=precision, tp=tp, table=table, fp8_activations=activations, verifier=verifier)
    result = pipeline.run(traced(family).graph, options)
    assert len(verifier.deviations) >= 8, "the verifier saw too few passes that change anything"
    return result


def possible(family: str) -> list[int]:
    """The degrees of tensor parallelism that a tiny model allows."""
    return [tp for tp in (1, 2, 3) if tp <= KV_HEADS.get(family, 2)]


CASES = [(family, tp) for family in FAMILIES for tp in possible(family)]


@pytest.mark.parametrize(("family", "tp"), CASES)
def test_every_pass_keeps_the_logits_and_layers_take_their_launches(family: str, tp: int) -> None:
    result = compiled(family, tp)
    for launches in result.launches:
        assert launches.layers == 2
        assert launches.per_layer == PER_LAYER.get(family, 8.0)
    for graph in result.graphs:
        assert graph.tp == tp
        assert {node.op for node in graph if node.path.endswith("self_attn")} <= {"linear", "slice", "rope_cache",
                                                                                 "paged_attention"}  # fmt: skip


@pytest.mark.parametrize(("family", "tp"), CASES)
def test_the_fused_graphs_compute_what_hugging_face_does(family: str, tp: int) -> None:
    result = compiled(family, tp)
    compare(result, params(family), tiny_model(family))
    assert [columns for _, columns in result.vocab] == [g.types()[g.outputs[0]].shape[1] for g in result.graphs]


def compare(result: Compiled, values: Callable[[str], np.ndarray], model: torch.nn.Module) -> None:
    """Asserts that the graphs, fed two prefill chunks and a decode, give the logits of the Hugging Face model."""
    tokens = np.random.default_rng(1).integers(3, model.config.vocab_size, 19).tolist()
    batches = [Batch(graph, (len(tokens),)) for graph in result.graphs]
    rows = []
    for chunk in (tokens[:11], tokens[11:18], tokens[18:]):
        steps = [batch.step([chunk], rows="all") for batch in batches]
        shards = run_ranks(result.graphs, steps[0][0], [context for _, context in steps], values)
        rows.append(np.concatenate([out for (out,) in shards], axis=-1))
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(np.concatenate(rows), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "per_layer"),
    [
        ("cohere", 10.0),  # interleaved rotation, a norm that subtracts the mean, attention and MLP side by side
        ("glm", 10.0),  # interleaved and partial rotation, tables in another form
        ("olmo2", 14.0),  # norms over all heads of q and k: generic code, linears that every rank computes whole
        ("smollm3", 8.0),  # some layers without rotation
        ("exaone4", 10.0),  # norms of each head of q and k, rotated in some layers only
    ],
)
def test_families_that_nobody_thought_of_compile_too(kind: str, per_layer: float) -> None:
    config = AutoConfig.for_model(
        kind, vocab_size=128, num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    origin = trace_model(config)
    values = params_of(model_tensors(model, origin.buffers))
    result = pipeline.run(origin.graph, CompileOptions(tp=2, verifier=Verifier(values)))
    compare(result, values, model)
    assert result.launches[0].per_layer <= per_layer


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
@pytest.mark.parametrize(
    ("precision", "activations"), [("bf16", "static"), ("fp8", "static"), ("fp8", "token"), ("int4", "token")]
)
def test_quantized_models_stay_near_and_fuse_alike(family: str, precision: str, activations: str) -> None:
    result = compiled(family, 2, precision, activations)
    assert result.kv_dtype == "bf16"
    for graph in result.graphs:
        kinds = graph.types()
        weights = {node.path: kinds[node.inputs[1]].dtype for node in graph if node.op in ("linear", "embedding")}
        head = {weights.pop("lm_head"), weights.pop("model.embed_tokens")}
        assert head == {"bf16"}
        assert set(weights.values()) == {{"bf16": "bf16", "fp8": "f8e4m3", "int4": "u4"}[precision]}
    assert result.launches[0].per_layer == PER_LAYER.get(family, 8.0)


def test_tables_of_sine_and_cosine_are_computed_once_for_all_layers() -> None:
    (graph,) = compiled("llama").graphs
    caches = [node for node in graph if node.op == "rope_cache"]
    assert len({node.inputs[3:5] for node in caches}) == 1
    assert sum("cos" in getattr(node.attrs, "expr", "") for node in graph) == 1


def test_reports_name_every_pass_and_its_matches() -> None:
    reports = {report.name: report for report in compiled("phi3").reports}
    assert reports["split_packed"].matched == 4
    assert (reports["fuse_rms_norm"].matched, reports["fuse_rms_norm"].expected) == (5, 5)
    assert (reports["fuse_rotary"].matched, reports["merge_qkv"].matched) == (2, 2)
    assert list(reports)[-1] == "check_lowerable"


def test_compiling_twice_gives_the_same_text() -> None:
    first, again = (pipeline.run(traced("qwen3").graph, CompileOptions(tp=2)) for _ in range(2))
    assert list(map(str, first.graphs)) == list(map(str, again.graphs))


def test_the_verifier_sees_every_pass() -> None:
    class Names:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def check(self, name: str, before: Sequence[Graph], after: Sequence[Graph]) -> None:
            self.seen.append(name)

    names = Names()
    result = pipeline.run(traced("llama").graph, CompileOptions(tp=2, verifier=names))
    assert names.seen == [report.name for report in result.reports]
    assert (names.seen[0], names.seen[-1]) == ("canonicalize", "check_lowerable")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (CompileOptions(precision="int3"), UsageError, "precision 'int3'"),
        (CompileOptions(tp=0), UsageError, "tp 0"),
        (CompileOptions(fp8_activations="guess"), UsageError, "is not one of token, static, none"),
        (CompileOptions(kv_dtype="f8"), UsageError, "kv dtype 'f8'"),
        (CompileOptions(precision="fp8", fp8_activations="static"), UsageError, "needs a calibration table"),
        (CompileOptions(tp=10), UnsupportedError, "tp 10 is larger than the 9 query heads"),
    ],
)
def test_options_that_cannot_be_honoured(options: CompileOptions, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline.run(traced("llama").graph, options)


def test_the_verifier_names_a_pass_that_breaks_the_model() -> None:
    graph = traced("llama").graph
    broken = parse_graph(str(graph).replace("scale=0.35", "scale=0.36"), attrs_of)
    with pytest.raises(VerifyError, match=r"pass clumsy changes what the model computes: logits deviate by"):
        Verifier(params("llama")).check("clumsy", (graph,), (broken,))
