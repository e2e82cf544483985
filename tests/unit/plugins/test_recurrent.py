"""The recurrences: kernels against their references over ragged steps; no cut, thread, slot or ISA changes a bit."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.types import TensorType
from llmc.plugins import OPERATORS, cpu_launch
from llmc.plugins.causal_conv import Attrs as Conv
from llmc.plugins.cpu.call import KernelEnv
from llmc.plugins.cpu.recurrent import logical, state_bytes, stored
from llmc.plugins.gated_delta import Attrs as Delta
from llmc.plugins.operator import StepContext
from llmc.plugins.selective_scan import Attrs as Selective
from llmc.plugins.ssd_scan import Attrs as Ssd
from tests.unit.plugins.compiled import ISAS, aligned
from tests.unit.plugins.native_step import Launch, Rank, Step, build, source

SLOTS = 5
#: Odd widths: parts of a vector, one channel, several blocks.
CASES = [
    ("causal_conv", Conv(0, 40, 4, bias=True, activation="silu")),
    ("causal_conv", Conv(0, 1, 2)),
    ("ssd_scan", Ssd(0, 6, 20, 2, 24, skip=True)),
    ("ssd_scan", Ssd(0, 2, 32, 1, 7)),
    ("selective_scan", Selective(0, 37, 5, skip=True)),
    ("selective_scan", Selective(0, 16, 16)),
    ("gated_delta", Delta(0, 4, 2, 20, 24, 0.3, normalize=True)),
    ("gated_delta", Delta(0, 3, 3, 16, 9, 0.25, per_key=True)),
]
NAMES = [f"{name}-{index}" for index, (name, _) in enumerate(CASES)]


def types_of(attrs: Any) -> tuple[TensorType, ...]:
    if isinstance(attrs, Conv):
        shapes: list[tuple[Any, ...]] = [("T", attrs.channels), (attrs.channels, attrs.taps)]
        shapes += [(attrs.channels,)] * attrs.bias
    elif isinstance(attrs, Ssd):
        inner, group = attrs.heads * attrs.head_dim, attrs.groups * attrs.state_size
        shapes = [("T", inner), ("T", group), ("T", group), ("T", attrs.heads), *[(attrs.heads,)] * (1 + attrs.skip)]
    elif isinstance(attrs, Selective):
        c, n = attrs.channels, attrs.state_size
        shapes = [("T", c), ("T", n), ("T", n), ("T", c), (c, n), *[(c,)] * attrs.skip]
    else:
        keys, rates = attrs.key_heads * attrs.key_dim, attrs.heads * (attrs.key_dim if attrs.per_key else 1)
        shapes = [("T", n) for n in (keys, keys, attrs.heads * attrs.value_dim, rates, attrs.heads)]
    return tuple(TensorType("f32", shape) for shape in shapes)


@cache
def launches() -> tuple[Launch, ...]:
    found = []
    for name, attrs in CASES:
        types, operator = types_of(attrs), OPERATORS[name]
        size = state_bytes(operator.state_shape(attrs))
        env = KernelEnv((1, 64), (1, 8), slot_bytes=size + 64, state_offsets={0: 64})
        outputs = operator.infer(attrs, types)
        found.append(Launch(cpu_launch(name)(attrs, types, outputs, env), types, outputs))
    return tuple(found)


class Setup:
    """One case: weights, the inputs of every token of some sequences, and a pool of states that starts as garbage."""

    def __init__(self, case: int, lengths: list[int], isa: str = ISAS[0], threads: int = 3) -> None:
        self.case, (name, self.attrs) = case, CASES[case]
        self.operator, self.types = OPERATORS[name], types_of(self.attrs)
        rng = np.random.default_rng(case)
        self.weights = {i: self._draw(rng, i, t, 0) for i, t in enumerate(self.types) if "T" not in t.shape}
        # Values of a sequence do not depend on which others there are.
        self.tokens = [
            {i: self._draw(np.random.default_rng([case, s, i]), i, t, n) for i, t in enumerate(self.types)}
            for s, n in enumerate(lengths)
        ]
        shape = self.operator.state_shape(self.attrs)
        self.context = StepContext(16, *[np.zeros(0, np.int32)] * 3)
        self.context.states = {0: np.full((SLOTS, *shape), np.nan, np.float32)}
        garbage = np.full((SLOTS, state_bytes(shape) + 64), 0xFF, np.uint8)
        self.rank = Rank(build(source(launches()))[isa], launches(), threads, state=aligned(garbage))

    def _draw(self, rng: np.random.Generator, index: int, kind: TensorType, count: int) -> np.ndarray:
        """Step sizes are above zero and rates of decay below, as models have them."""
        value = rng.standard_normal([count if d == "T" else int(d) for d in kind.shape]).astype(np.float32)
        if isinstance(self.attrs, Ssd | Selective):
            return {3: np.abs(value), 4: -np.abs(value)}.get(index, value)
        if isinstance(self.attrs, Delta):
            return {3: -np.abs(value), 4: 1 / (1 + np.exp(-value))}.get(index, value)
        return value

    def step(self, spans: list[tuple[int, int, int]], slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(sequence, first, last) of each chunk -> what the reference and the kernel make of them."""
        inputs = []
        for i, kind in enumerate(self.types):
            if "T" in kind.shape:
                rows = np.concatenate([self.tokens[s][i][first:last] for s, first, last in spans])
                wide = np.full((len(rows), rows.shape[1] + 3), np.nan, np.float32)  # rows that lie apart
                wide[:, : rows.shape[1]] = rows
                inputs.append(wide[:, : rows.shape[1]])
            else:
                inputs.append(aligned(self.weights[i]))
        counts = [last - first for _, first, last in spans]
        context = dataclasses.replace(
            self.context,
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_len=np.array([last for *_, last in spans], np.int32),
            state_slots=np.array(slots, np.int32),
        )
        (want,) = self.operator.reference(context, self.attrs, inputs)
        out = aligned(np.full(want.shape, np.nan, np.float32))
        tables = np.zeros((len(spans), 1), np.int32)
        step = Step(context.query_start, context.context_len, tables, context.state_slots)
        assert self.rank.call(self.case, step, inputs, [out]) == 0
        return want, out

    def run(self, cuts: list[list[int]], slots: list[int], compare: bool = True) -> list[np.ndarray]:
        """Every sequence's result, computed in steps: `cuts[n][s]` tokens of sequence s in step n, 0 to sit out."""
        done, parts = [0] * len(slots), [[] for _ in slots]
        for counts in cuts:
            spans = [(s, done[s], done[s] + n) for s, n in enumerate(counts) if n]
            want, got = self.step(spans, [slots[s] for s, *_ in spans])
            if compare:
                np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
            for s, first, last in spans:
                parts[s].append(got[: last - first])
                got, done[s] = got[last - first :], last
        return [np.concatenate(part) for part in parts]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_kernel_is_the_reference_over_ragged_steps(case: int, isa: str) -> None:
    setup = Setup(case, [9, 7, 6], isa)
    setup.run([[5, 1, 0], [1, 5, 3], [3, 1, 3]], [4, 0, 2])
    shape = setup.operator.state_shape(setup.attrs)
    assert setup.rank.state is not None
    for slot in (4, 0, 2):
        state = logical(setup.rank.state[slot, 64:].view(np.float32), shape)
        np.testing.assert_allclose(state, setup.context.states[0][slot], rtol=2e-5, atol=2e-5)
    assert (setup.rank.state[[1, 3]] == 0xFF).all(), "a slot that nobody holds was written"
    assert (setup.rank.state[:, :64] == 0xFF).all(), "another layer's part of a slot was written"


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_bits_depend_on_neither_cuts_nor_company_nor_threads_nor_isa(case: int) -> None:
    together = Setup(case, [9, 7, 6]).run([[9, 7, 6]], [0, 1, 2])
    for isa in ISAS:
        apart = Setup(case, [9, 7, 6], isa, threads=1).run([[4, 0, 1], [1, 7, 1], [4, 0, 4]], [3, 1, 4], compare=False)
        assert all(np.array_equal(a, b) for a, b in zip(together, apart, strict=True))
    for alone, length in enumerate((9, 7, 6)):
        _, got = Setup(case, [9, 7, 6]).step([(alone, 0, length)], [2])
        assert np.array_equal(got, together[alone])


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_a_slot_that_changes_hands_brings_nothing_along(case: int) -> None:
    setup = Setup(case, [6, 6])
    setup.step([(0, 0, 6)], [1])
    _, reused = setup.step([(1, 0, 6)], [1])
    _, fresh = Setup(case, [6, 6]).step([(1, 0, 6)], [1])
    assert np.array_equal(reused, fresh)


def test_stored_and_logical_are_inverse() -> None:
    state = np.random.default_rng(0).standard_normal((3, 5, 21)).astype(np.float32)
    memory = stored(state)
    assert memory.nbytes == state_bytes(state.shape) == 3 * 5 * 32 * 4
    assert memory.shape == (3, 2, 5, 16)
    assert np.array_equal(logical(memory, state.shape), state)
    assert not memory[:, 1, :, 5:].any()


@pytest.mark.parametrize(
    ("name", "attrs", "error"),
    [
        ("causal_conv", Conv(0, 4, 1), "taps=1"),
        ("causal_conv", Conv(0, 4, 2, activation="tanh"), "activation='tanh'"),
        ("ssd_scan", Ssd(0, 3, 4, 2, 4), "not a multiple of groups=2"),
        ("gated_delta", Delta(0, 3, 2, 4, 4, 1.0), "not a multiple of key_heads=2"),
        ("selective_scan", Selective(0, 4, 4), "expected"),
    ],
)
def test_type_rules_refuse(name: str, attrs: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        OPERATORS[name].infer(attrs, [TensorType("f32", ("T", 4))])
