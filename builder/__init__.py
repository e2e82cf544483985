"""The compiler: from a checkpoint to one fused graph per rank, to code, to engine.plan."""
