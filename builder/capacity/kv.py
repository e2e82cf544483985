"""How many bytes a token takes of the cache, as a formula: layers, KV heads, widths, bytes of a number.

Comes in: what each rank's layers keep, the cache's dtype. Goes out: quantities of a `Sheet`. Must not know: GPUs,
requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmc.artifacts.types import NUMPY_DTYPES
from llmc.builder.capacity.sheet import Sheet
from llmc.builder.page.costs import KvShape


def give_kv(sheet: Sheet, ranks: Sequence[Mapping[int, KvShape]], kv_dtype: str) -> None:
    """`kv_token`, of all ranks, and `rank_kv_token`, of the rank that keeps most; of layers of several kinds each kind
    has its line. `ranks`: `kv_shapes` of each.
    """
    sheet.give("kv_item", NUMPY_DTYPES[kv_dtype].itemsize, "B", f"a number in {kv_dtype}")
    everywhere: dict[int, KvShape] = {}
    for layers in ranks:
        for layer, shape in layers.items():
            before = everywhere.get(layer, replace(shape, heads=0))
            everywhere[layer] = replace(shape, heads=before.heads + shape.heads)
    _token(sheet, "", Counter(everywhere.values()), "keys and values of a token")
    if len(ranks) == 1:
        sheet.derive("rank_kv_token", "kv_token", "B", "of the one rank")
        return
    fullest = max(ranks, key=lambda layers: sum(shape.numbers for shape in layers.values()))
    _token(sheet, "rank_", Counter(fullest.values()), "of the largest rank")


def _token(sheet: Sheet, prefix: str, kinds: Counter[KvShape], note: str) -> None:
    """`{prefix}kv_token` of so many layers of each kind."""
    parts = []
    for number, (shape, layers) in enumerate(kinds.items(), 1):
        end = f"_{number}" if len(kinds) > 1 else ""
        count, heads, width = (f"{prefix}kv_{name}{end}" for name in ("layers", "heads", "width"))
        sheet.give(count, layers, "layers", "that keep the same of a token")
        sheet.give(
            heads, shape.heads, "KV heads", "of such a layer" + (", all read the latent" if shape.latent else "")
        )
        sides = ("a latent", "its rotated part") if shape.latent else ("a key", "a value")
        sheet.give(
            width, shape.first + shape.second, "numbers", f"{sides[0]} of {shape.first}, {sides[1]} of {shape.second}"
        )
        parts.append(f"{count} * {heads} * {width} * kv_item")
    if len(parts) > 1:
        names = [f"{prefix}kv_token_{number}" for number in range(1, len(parts) + 1)]
        for name, formula in zip(names, parts, strict=True):
            sheet.derive(name, formula, "B", "of a token in layers of this kind")
        parts = names
    sheet.derive(f"{prefix}kv_token", " + ".join(parts) or "0", "B", note)
