"""What `llmc bench` is told about how kernels multiply is what their types and macros decide, level by level."""

from __future__ import annotations

import pytest

from llmc.plugins.cpu.blocks import KV_TYPES
from llmc.plugins.cpu.products import linear_products
from llmc.plugins.linear.cpu import FORMATS
from llmc.plugins.paged_attention.cpu import in_tiles
from llmc.profiles import load_cpu_target
from tests.unit.plugins.compiled import compile_library

LEVELS = ("x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "x86-64-v4-bf16", "x86-64-amx")
#: Whole tiles of bf16 and of INT8, of bf16 alone, pairs, and neither.
COLUMNS = (576, 96, 34, 33)
_LINEAR = """
#include "plugins/linear/cpu.h"
namespace llmc {
template <int K, class F>
constexpr int products() {
  using Format = typename lin::Products<K, F, lin::Plain>::Format;
  constexpr bool whole = std::is_same_v<typename Format::Sums, lin::WholeSums>;
  if (lin::kInTiles<Format>) return whole ? LLMC_INT8_TILES : LLMC_BF16_TILES;
  if (whole) return LLMC_INT8_PAIRS;
  return std::is_same_v<typename Format::Sums, lin::FloatSums> ? LLMC_FLOATS : LLMC_BF16_PAIRS;
}
"""


@pytest.mark.parametrize("isa", LEVELS)
def test_linear_multiplies_as_it_says(isa: str) -> None:
    features = load_cpu_target(f"cpu:{isa}").features
    checks = [
        f"static_assert(products<{k}, lin::{name}>() == {linear_products(dtype, k, features).value});"
        for dtype, name in FORMATS.items()
        for k in COLUMNS
    ]
    compile_library("\n".join([_LINEAR, *checks, "}"]), isa, emulate=False)


@pytest.mark.parametrize("isa", LEVELS)
def test_attention_has_tiles_where_its_cache_lies_so(isa: str) -> None:
    tiles = load_cpu_target(f"cpu:{isa}").tiles
    checks = [
        f"static_assert(llmc::BlockLayout<1, {d}, {dv}, 16, {kv}>::kTiled == {in_tiles(d, dv, dtype, tiles):d});"
        for dtype, kv in KV_TYPES.items()
        for d, dv in ((64, 64), (64, 40), (48, 64))
    ]
    compile_library("\n".join(['#include "plugins/paged_attention/layout.h"', *checks]), isa, emulate=False)
