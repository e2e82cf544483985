"""llmc: an ahead-of-time compiler for language models, and a lean runner for what it compiles."""

__version__ = "0.1.0"
