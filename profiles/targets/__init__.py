"""Targets: what machines code is generated for, one text file each. Comes in: `cpu` or `cpu:ISA`. Goes out:
`TargetDescription`. Must not know: the live machine.

Plain `cpu` is x86-64-v3, wherever the build runs: a plan's bytes must not depend on the machine that wrote it. Building
for a level that the build machine lacks works; only running such a plan needs the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.errors import UsageError
from llmc.artifacts.schema import Target
from llmc.profiles.reading import Fields, suggestion
from llmc.profiles.tactics import Tactics

_FOLDER = Path(__file__).parent
_KEYS = ("kind", "isa", "cxx_flags", "features", "block_sizes", "fp8_activations", "tactics")
_DEFAULTS = {"cpu": "x86-64-v3"}


@dataclass(frozen=True)
class TargetDescription:
    """`isa_flags` select the ISA in g++; `features` are the /proc/cpuinfo flags that a machine must show;
    `block_sizes`: tokens of a KV block that the kernels are written for; `fp8_activations` token|static|none: what an
    FP8 build makes of inputs unless it is told; `tactics`: how kernels cut their work unless a file says otherwise.
    """

    kind: str
    isa: str
    isa_flags: tuple[str, ...]
    features: tuple[str, ...]
    block_sizes: tuple[int, ...]
    fp8_activations: str
    tactics: Tactics

    @property
    def cxx_flags(self) -> tuple[str, ...]:
        """What g++ is told of the target."""
        return (*self.isa_flags, *self.tactics.cxx_flags)

    def __str__(self) -> str:
        return f"{self.kind}:{self.isa}"

    @property
    def fingerprint(self) -> Target:
        """What the manifest says."""
        return Target(self.kind, self.isa, self.features)


def target_names() -> list[str]:
    """All that `load_target` takes, without defaults."""
    return sorted(f"cpu:{path.stem}" for path in _FOLDER.glob("*.yaml"))


def load_target(name: str, tactics: Tactics | None = None) -> TargetDescription:
    """The target `kind` or `kind:isa`, with `tactics` or its own. Raises UsageError with the names for any other."""
    kind, _, isa = name.partition(":")
    full = f"{kind}:{isa or _DEFAULTS.get(kind, '')}"
    if full not in target_names():
        known = [*_DEFAULTS, *target_names()]
        raise UsageError(f"target {name!r} is not one of {', '.join(known)}{suggestion(name, known)}")
    fields = Fields.read(_FOLDER / f"{full.partition(':')[2]}.yaml", _KEYS)
    return TargetDescription(
        kind=fields.text("kind"),
        isa=fields.text("isa"),
        isa_flags=fields.sequence("cxx_flags", str),
        features=fields.sequence("features", str),
        block_sizes=fields.sequence("block_sizes", int),
        fp8_activations=fields.text("fp8_activations"),
        tactics=Tactics.of(fields.values.get("tactics"), f"{fields.where}: tactics") if tactics is None else tactics,
    )
