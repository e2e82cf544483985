"""How fast a plan is, and how fast this machine lets it be: limits, works, systems, operators, picture.

Comes in: a plan, optionally peers. Goes out: measurements, as data. Must not know: printing. A plan alone needs neither
compiler nor PyTorch.
"""
