"""The compiler: from a checkpoint to one fused graph per rank, to code, to engine.plan."""

import os

# Read by OpenMP when PyTorch is first imported. By default its threads spin at every barrier, which on a core that is
# shared with anything else (CI, a container) makes small steps several times slower; a user's own setting wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
