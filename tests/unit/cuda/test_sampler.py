"""The choice of tokens on a GPU, interpreted, beside the numpy reference: the very same tokens. Not run on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.artifacts.sampler_params import SAMPLER_FIELDS
from llmc.builder.cuda.interpret import Address, Launch
from llmc.builder.cuda.variant import variant
from llmc.plugins.sampler import reference
from llmc.plugins.sampler.cuda import launch
from llmc.runtime.native_sampler import SamplingRow
from llmc.runtime.sampling import params_of
from tests.unit.cuda.backend import architecture, memory, run
from tests.unit.cuda.compiled import check_cubin, compiled
from tests.unit.cuda.harness import UNWRITTEN


def choose(logits: np.ndarray, rows: Sequence[SamplingRow], block: int | None = None) -> list[int]:
    """i32[S] as the kernel leaves it; `block`: logits that a program looks at together."""
    count, vocab = logits.shape
    sampler_params = np.array([params_of(row) for row in rows], np.int32)
    call = launch(vocab)
    room, top, places = memory(), 4096, {}
    sizes = {
        "logits": 4 * logits.size,
        "arena": 4 * logits.size,
        "sampler_params": sampler_params.nbytes,
        "tokens": 4 * count,
    }
    for name, size in sizes.items():
        places[name] = Address(top, size, "f32" if name == "logits" else "i32")
        room[top : top + size + 256] = UNWRITTEN
        top += -(-size // 256) * 256 + 256

    def view(name: str, dtype: Any) -> np.ndarray:
        place = places[name]
        return room[place.offset : place.offset + place.nbytes].view(dtype)

    view("logits", np.float32)[:] = logits.reshape(-1)
    view("sampler_params", np.int32)[:] = sampler_params.reshape(-1)
    args = {name: places[arg.name] for name, arg in call.args.items()}  # type: ignore[union-attr]
    if block is not None:
        call = replace(call, constexprs={**call.constexprs, "BLOCK": block})
    run([Launch(call.kernel, args, call.constexprs, (count, 1, 1))], lambda: [variant(call, architecture(), {}, {})])
    return view("tokens", np.int32).tolist()


ROWS = st.builds(
    SamplingRow,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-3, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 17, 1000]),
    seed=st.integers(0, 2**64 - 1),
    counter=st.integers(0, 2**31),
)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    vocab=st.integers(2, 70),
    kind=st.sampled_from(["plain", "ties", "far apart", "unusable"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=12, deadline=None)
def test_chooses_as_the_reference(rows: list[SamplingRow], vocab: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((len(rows), vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "far apart":
        logits = logits * np.float32(60)
        logits[:, rng.integers(vocab)] = -np.inf
    elif kind == "unusable":
        logits[0, rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        logits[-1] = -np.inf
    assert choose(logits, rows, block=32) == [reference.sample(*pair).token for pair in zip(logits, rows, strict=True)]


def test_a_vocabulary_of_49152() -> None:
    rng = np.random.default_rng(5)
    rows = [
        SamplingRow(0.0),
        SamplingRow(1.0, seed=3),
        SamplingRow(0.8, top_p=0.95, top_k=50, seed=4, counter=7),
        SamplingRow(1.3, top_p=0.9, min_p=0.02, seed=2**63 + 5),
    ]
    logits = (rng.standard_normal((len(rows), 49152)) * 2).astype(np.float32)
    assert choose(logits, rows) == [reference.sample(*pair).token for pair in zip(logits, rows, strict=True)]


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"num_logprobs": 0},
        {"bias_ids": np.zeros(1, np.int32), "bias": np.ones(1, np.float32)}, {"banned": np.zeros(1, np.int32)},
    ],
)  # fmt: skip
def test_other_rows_are_left_to_the_host(change: dict[str, Any]) -> None:
    assert params_of(SamplingRow(**change)) == (0,) * len(SAMPLER_FIELDS)
    found = choose(np.zeros((2, 8), np.float32), [SamplingRow(0.0), SamplingRow(**change)])
    assert found[0] == 0
    assert np.array(found[1], np.int32).tobytes() == bytes([UNWRITTEN] * 4)


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_compiled(sm: int) -> None:
    (cubin,) = compiled([variant(launch(49152), sm, {}, {})])
    check_cubin(cubin, sm)
