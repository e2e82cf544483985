"""Plug-ins: one folder an operator, complete (signature, type rule, reference, kernels) or absent.

Goes out: `OPERATORS`, the table of every folder here that exports `OPERATOR`. Must not know: builder, runtime.
"""

from __future__ import annotations

import importlib
import pkgutil

from llmc.plugins.operator import Operator


def _discover() -> dict[str, Operator]:
    """Imports every sub-package, in order of name; one without `OPERATOR` is shared code of a target."""
    found: dict[str, Operator] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.ispkg:
            operator = getattr(importlib.import_module(f"{__name__}.{module.name}"), "OPERATOR", None)
            if operator is not None:
                found[operator.name] = operator
    return found


#: Operator name -> operator.
OPERATORS: dict[str, Operator] = _discover()
