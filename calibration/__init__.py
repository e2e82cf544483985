"""How linear layers become FP8: runs data through the Hugging Face model, rounds its weights, writes a table.

Comes in: a checkpoint, text files or none. Goes out: a `CalibrationTable` and a file of rounded weights; figures that
compare two models. Must not know: the graph (a pass of the builder reads the table), plans, the runtime.
"""

from llmc.calibration.run import CalibrationOptions, cached_table, calibrate

__all__ = ["CalibrationOptions", "cached_table", "calibrate"]
