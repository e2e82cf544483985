"""Matrix products as they are compiled: nothing spills, tensor cores do the work, memory is read in wide pieces."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import pytest

from llmc.artifacts.errors import UnsupportedError
from llmc.artifacts.types import TensorType
from llmc.builder.cuda.code import spills
from llmc.builder.cuda.cubin import Cubin
from llmc.builder.cuda.sass import instructions
from llmc.builder.cuda.variant import Variant
from llmc.plugins import embedding, grouped_linear, head_linear, linear, quantize
from llmc.plugins.cuda.call import CudaEnv
from llmc.plugins.operator import Operator
from llmc.profiles.targets import load_target
from tests.unit.cuda.compiled import check_cubin, compiled, variants

DEPTH, SIZE, EXPERTS, SLOTS = 576, 1536, 8, 2


@dataclass(frozen=True)
class Case:
    """Launches of an operator on an architecture, and the tensor-core instructions of the product among them."""

    sm: int
    kind: str
    decode: bool
    gated: bool
    expected: str | None

    def types(self) -> list[TensorType]:
        dtype = self.kind.split()[0]
        found = [TensorType("f32", ("T", DEPTH)), TensorType(dtype, (SIZE, DEPTH))]
        if dtype == "u4":
            by_group = (SIZE, linear.groups(DEPTH))
            found += [TensorType("f16", by_group), TensorType("u4", by_group)]
        if dtype in ("f8e4m3", "i8"):
            found.append(TensorType("f32", (SIZE,)))
        if self.kind == "f8e4m3 x":
            found[0] = TensorType("f8e4m3", ("T", DEPTH))
            found.append(TensorType("f32", ("T", 1)))
        return found

    def made(self) -> Variant:
        """The product's; an INT8 one has a launch before it."""
        attrs = linear.Attrs(epilogue="silu_gate" if self.gated else "none", x_per_token=self.kind == "i8")
        return variants(linear.OPERATOR, attrs, self.types(), env_of(self.sm, self.decode))[-1]


CASES = [
    *[Case(sm, "bf16", False, True, made) for sm, made in {
        80: "HMMA.*BF16", 89: "HMMA.*BF16", 90: "HGMMA.*BF16", 100: "UTCHMMA", 120: "HMMA.*BF16"}.items()],
    *[Case(sm, "f8e4m3 x", False, True, made) for sm, made in {
        89: "QMMA.*E4M3", 90: "QGMMA.*E4M3", 100: "UTCQMMA", 120: "QMMA.*E4M3"}.items()],
    Case(80, "bf16", True, False, "HMMA.*BF16"),
    Case(90, "f8e4m3 x", True, False, "QGMMA.*E4M3"),
    Case(120, "f8e4m3 x", True, True, "QMMA.*E4M3"),
    Case(89, "f8e4m3", True, False, "HMMA.*BF16"),
    Case(80, "i8", False, False, "IMMA"),
    Case(90, "i8", True, False, "IGMMA"),
    Case(89, "u4", False, True, "HMMA.*BF16"),
    Case(90, "u4", False, False, "HGMMA.*BF16"),
    Case(100, "u4", True, False, "UTCHMMA"),
    Case(90, "f32", False, True, None),
]  # fmt: skip


def env_of(sm: int, decode: bool, op: str = "linear") -> CudaEnv:
    """The target's own tactics."""
    tactics = load_target(f"cuda:sm_{sm}").tactics[op]
    return CudaEnv(sm=sm, tokens=(1, 64) if decode else (1, 2048), decode=decode, max_sequences=64, tactics=tactics)


@pytest.fixture(scope="module")
def cubins() -> list[Cubin]:
    """All at once, so that two processes share the work."""
    return compiled([case.made() for case in CASES])


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_linear_uses_tensor_cores_and_spills_nothing(number: int, cubins: list[Cubin]) -> None:
    check_cubin(cubins[number], CASES[number].sm, CASES[number].expected)
    used = instructions(cubins[number].code)
    assert used["LDGSTS.E.BYPASS.128"], "the weights are not fetched 16 bytes at a time, ahead of their use"
    assert used["STG.E.128"], "results are not stored 16 bytes at a time"


def test_other_operators_spill_nothing() -> None:
    index, weights = TensorType("i32", ("T", SLOTS)), TensorType("f32", ("T", SLOTS))
    rounded = [TensorType("f8e4m3", ("T", DEPTH)), index, TensorType("f8e4m3", (EXPERTS, SIZE, DEPTH))]
    scales = [TensorType("f32", (EXPERTS, SIZE)), TensorType("f32", ("T", 1))]
    gated = grouped_linear.Attrs(gated=True, expr="mul(silu(i0), i1)")
    combined = grouped_linear.Attrs(combine=True)
    plain = [TensorType("f32", ("T", SLOTS, DEPTH)), index, TensorType("bf16", (EXPERTS, SIZE, DEPTH)), weights]
    heads = [TensorType("f32", ("T", 9 * 128)), TensorType("bf16", (9, 512, 128))]
    ids = [TensorType("i32", ("T",)), TensorType("bf16", (49152, DEPTH))]
    wanted: list[tuple[Operator, Any, list[TensorType], int, str | None]] = [
        (quantize.OPERATOR, quantize.Attrs(), [TensorType("f32", ("T", 28672))], 90, None),
        (embedding.OPERATOR, embedding.Attrs(), ids, 90, None),
        (head_linear.OPERATOR, head_linear.Attrs(), heads, 80, "HMMA.*BF16"),
        (grouped_linear.OPERATOR, gated, [*rounded, *scales], 90, "QGMMA.*E4M3"),
        (grouped_linear.OPERATOR, combined, plain, 89, "HMMA.*BF16"),
    ]
    made, expected = [], []
    for operator, attrs, types, sm, instruction in wanted:
        tactics = operator.name if operator.name.endswith("linear") else "linear"
        for found in variants(operator, attrs, types, env_of(sm, False, tactics)):
            product = found.kernel.rpartition(":")[2] in ("experts", "head_gemm")
            made.append(found)
            expected.append((sm, instruction if product else None))
    for cubin, (sm, instruction) in zip(compiled(made), expected, strict=True):
        check_cubin(cubin, sm, instruction)


def test_fp8_weights_are_refused_before_sm_89() -> None:
    with pytest.raises(UnsupportedError, match=r"cuda:sm_80 has no FP8 \(kernel linear.kernels:gemm\)"):
        Case(80, "f8e4m3", True, False, None).made()


def test_a_product_whose_registers_do_not_suffice_is_told() -> None:
    sound = Case(80, "bf16", False, True, None).made()
    numbers = dict(sound.constexprs) | {"ROWS": 128, "COLUMNS": 128}
    large = dataclasses.replace(sound, constexprs=tuple(numbers.items()), num_warps=4)
    (fits, spilled) = compiled([sound, large])
    assert spills({sound: fits}) == []
    (note,) = spills({large: spilled, sound: fits})
    assert re.fullmatch(r"kernel linear\.kernels:gemm keeps [1-9]\d* bytes of a thread's registers in memory, .*", note)
