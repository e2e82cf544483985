"""A lowered model as TensorRT engines. Comes in: `TrtLowered`, weights, TensorRT's module. Goes out: the same with the
engines' sizes, and the plan's sections. Must not know: checkpoints, how an engine is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.artifacts.errors import EnvironmentFault
from llmc.artifacts.trt_program import MIXED, VERSION, TrtProgram, TrtTensor, encode_trt_program
from llmc.builder.trt.caches import cache_for
from llmc.builder.trt.engine import TrtEngine, build_engine
from llmc.builder.trt.lower import TrtLowered, TrtRank
from llmc.builder.trt.paged_cache import POOL_PREFIX
from llmc.builder.trt.steps import step_ranges


def build_rank(
    trt: Any, lowered: TrtLowered, rank: TrtRank, weights: Callable[[str], np.ndarray]
) -> tuple[TrtRank, dict[str, bytes]]:
    """The rank with its engine's sizes, and the sections `code/rank<N>.engine` and `code/rank<N>.json`. `weights`: by
    recipe. Raises what `build_engine` raises, EnvironmentFault where the engine cannot be loaded here.
    """
    graph, profile, sm = rank.graph, lowered.profile, lowered.target.sm
    made = build_engine(trt, graph, weights, cache_for(trt, graph, profile, lowered.kv_dtype, sm), profile, sm)
    loaded = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(made.engine)
    if loaded is None:
        raise EnvironmentFault(f"TensorRT {trt.__version__} cannot load the engine that it built; its log says why")
    context = int(loaded.device_memory_size_v2)
    built = replace(rank, engine_bytes=len(made.engine), context_bytes=context)
    program = _program(trt, lowered, built, made)
    return built, {built.weights_section: made.engine, built.section: encode_trt_program(program)}


def _program(trt: Any, lowered: TrtLowered, rank: TrtRank, made: TrtEngine) -> TrtProgram:
    profile = lowered.profile
    logits = rank.types[rank.graph.outputs[0]]
    return TrtProgram(
        version=VERSION,
        rank=rank.rank,
        tp=rank.graph.tp,
        sm=lowered.target.sm,
        tensorrt=str(trt.__version__),
        engine=rank.weights_section,
        tensors=(*_inputs(rank, made), TrtTensor("logits", "f32", logits.shape, "logits", output=True)),
        arena_bytes=rank.arena_bytes,
        kv_block_bytes=rank.kv_block_bytes,
        columns=rank.vocab,
        logits_width=int(logits.shape[-1]),
        vocab=lowered.vocab_size,
        block_size=profile.block_size,
        max_tokens=profile.max_num_batched_tokens,
        max_num_seqs=profile.max_num_seqs,
        max_seq_len=profile.max_seq_len,
        max_blocks=step_ranges(profile)[MIXED]["num_blocks"].most,
    )


def _inputs(rank: TrtRank, made: TrtEngine) -> list[TrtTensor]:
    """The arrays of a step under their names, and the pool of each layer, which is also what the engine gives back."""
    offsets = {f"{POOL_PREFIX}{layer.layer}": layer.offset for layer in rank.kv_layers}
    found = []
    for name, (dtype, shape) in made.inputs.items():
        if name not in offsets:
            found.append(TrtTensor(name, dtype, shape, name))
            continue
        pool = TrtTensor(name, dtype, shape, "kv", block_offset=offsets[name])
        found += [pool, TrtTensor(f"{name}.out", dtype, shape, "kv", output=True, block_offset=offsets[name])]
    return found
