"""The passes: one file each, each a pure function from a graph to a graph and a report. `pipeline.py` has the order."""
