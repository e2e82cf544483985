"""Tables for tests that need one quickly or of an older form."""

from __future__ import annotations

import dataclasses

from llmc.artifacts.calibration import CalibrationTable, Ranges


def ranges_alone(table: CalibrationTable) -> CalibrationTable:
    """What a table of version 1 holds of it: ranges, no choices, no rounded weights."""
    tensors = {p: Ranges(r.input_amax, r.weight_amax) for p, r in table.tensors.items() if p != table.head}
    return dataclasses.replace(table, tensors=tensors, activations=None, budget=None, rounded=None, head=None)
