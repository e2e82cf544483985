"""Shape profiles and targets as YAML, and their loaders. Must not know: the live machine, builder, plugins.

Comes in: names or paths. Goes out: `ShapeProfile`, `TargetDescription`, `Tactics`.
"""

from llmc.profiles.loader import load_profile, profile_names
from llmc.profiles.tactics import Tactics
from llmc.profiles.targets import TargetDescription, load_target, target_names

__all__ = ["Tactics", "TargetDescription", "load_profile", "load_target", "profile_names", "target_names"]
