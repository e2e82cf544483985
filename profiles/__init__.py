"""Shape profiles and targets as YAML, and their loaders. Must not know: the live machine, builder, plugins.

Comes in: names or paths. Goes out: `ShapeProfile`, `TargetDescription`.
"""

from llmc.profiles.loader import load_profile, profile_names
from llmc.profiles.targets import TargetDescription, load_target, target_names

__all__ = ["TargetDescription", "load_profile", "load_target", "profile_names", "target_names"]
