"""Ranges for quantization: runs data through the Hugging Face model and writes a calibration table.

Comes in: a checkpoint, text files or none. Goes out: a `CalibrationTable`; figures that compare two models. Must not
know: the graph (a pass of the builder reads the table), plans, the runtime.
"""

from llmc.calibration.observe import calibrate

__all__ = ["calibrate"]
