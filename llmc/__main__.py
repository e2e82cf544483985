"""`python -m llmc` is the command line."""

from llmc.cli import main

main()
