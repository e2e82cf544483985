"""How translations are entered: ATen operator name -> function from arguments to a value of our graph.

Comes in: translations. Goes out: `Table`, `entering`, `IDENTITIES`. Must not know: single translations, model families.
"""

from __future__ import annotations

from collections.abc import Callable

from llmc.builder.trace.emitter import Value

#: Gets the `Emitter` and the arguments as the operator's schema names them, with values for tensors; returns a value,
#: or a tuple of values where the operator has several results.
Translation = Callable[..., Value | tuple[Value, ...]]
#: By `name` or, looked up first, `name.overload`.
Table = dict[str, Translation]

#: Operators that compute nothing in evaluation mode, or only on the host.
IDENTITIES = frozenset(
    {"contiguous", "clone", "detach", "detach_", "alias", "dropout", "dropout_", "native_dropout", "lift_fresh",
     "lift_fresh_copy", "positive", "feature_dropout"}
)  # fmt: skip


def entering(table: Table) -> Callable[..., Callable[[Translation], Translation]]:
    """A decorator `@enter("name", ...)` that puts a translation into the table."""

    def enter(*names: str) -> Callable[[Translation], Translation]:
        def keep(translation: Translation) -> Translation:
            table.update(dict.fromkeys(names, translation))
            return translation

        return keep

    return enter
