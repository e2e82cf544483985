"""What an engine artifact is: the plan file, its manifest, checkpoint hashes, the lock file, calibration tables."""

#: The version of llmc, as pyproject.toml has it: it stands in every plan.
VERSION = "0.1.0"
