"""Is the plan that stands at the output already this build? Then nothing is done, within a second or two.

Comes in: what a build is made from and its options. Goes out: a key over all of it, and the report of the build of that
key. Must not know: how plans are made; imports neither torch nor transformers.

The key is over the checkpoint's files, every option that changes the plan or decides whether it is published, the files
that options name, llmc's own sources, the libraries, Python and the C++ compiler. Finished plans are not kept in the
cache, only what each key gave: a plan that is no longer at its output is made anew, from the cached stages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts import VERSION
from llmc.artifacts.errors import PlanError
from llmc.artifacts.plan import Plan
from llmc.builder.cpu.cache import ObjectCache
from llmc.builder.cpu.toolchain import find_compiler
from llmc.builder.file_hashes import FileHashes
from llmc.builder.sources import sources_digest

if TYPE_CHECKING:
    from llmc.builder.report import BuildReport

_ROOMS = ("artifacts", "plugins", "profiles", "builder", "calibration", "runtime", "")
_LIBRARIES = (
    "gguf", "jinja2", "ml_dtypes", "msgspec", "numpy", "nvidia-modelopt", "safetensors", "tensorrt", "tokenizers",
    "torch", "transformers",
)  # fmt: skip


#: What checkpoints, tokenizers and texts are stored in, as far as a build reads them.
_READ = frozenset({".json", ".jsonl", ".jinja", ".model", ".safetensors", ".txt"})


@dataclasses.dataclass(frozen=True)
class Inputs:
    """`settings` are the options by name; `files` those that options name."""

    model: Path
    settings: Mapping[str, object]
    files: Mapping[str, Path]
    cxx: str = "g++"


def build_key(inputs: Inputs, hashes: FileHashes) -> str | None:
    """None where something that is named is not there: the build itself says what."""
    try:
        model = _checkpoint(inputs.model, hashes)
        files = {option: digests(path, hashes) for option, path in inputs.files.items()}
    except OSError:
        return None
    parts = {
        "llmc": [VERSION, sources_digest(_ROOMS)],
        "python": sys.version,
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "toolchain": find_compiler(inputs.cxx).version,
        "model": model,
        "settings": dict(inputs.settings),
        "files": files,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _checkpoint(path: Path, hashes: FileHashes) -> list[list[str]]:
    """Name and SHA-256 of a GGUF file, or of a checkpoint folder's files; OSError for what is neither, unread."""
    if not path.is_dir():
        return digests(path, hashes)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(path / "config.json")
    return [[file.name, hashes.sha256(file)] for file in sorted(path.iterdir()) if file.suffix in _READ]


def digests(path: Path, hashes: FileHashes) -> list[list[str]]:
    """Name and SHA-256 of a file, or of all files of a folder of texts. Raises OSError, also for a device or pipe."""
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(path)
        return [[path.name, hashes.sha256(path)]]
    files = sorted(file for file in path.rglob("*") if file.suffix in _READ and file.is_file())
    return [[file.relative_to(path).as_posix(), hashes.sha256(file)] for file in files]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


@dataclasses.dataclass(frozen=True)
class Builds:
    """What earlier builds gave, by their keys. `cache` None: nothing is known and nothing remembered."""

    cache: ObjectCache | None
    hashes: FileHashes

    def key(self, inputs: Inputs) -> str | None:
        """See `build_key`."""
        return None if self.cache is None else build_key(inputs, self.hashes)

    def unchanged(self, key: str | None, output: Path) -> BuildReport | None:
        """The report of the build of this key, if its plan stands at `output` byte for byte."""
        known = None if self.cache is None or key is None else self.cache.get(key)
        if known is None or not output.is_file():
            return None
        entry = json.loads(known)
        try:
            if Plan.open(output, verify=False).digest != entry["report"]["digest"]:
                return None
            if self.hashes.sha256(output) != entry["sha256"]:
                return None
        except (PlanError, OSError):
            return None
        import msgspec

        from llmc.builder.report import BuildReport

        report = msgspec.convert(entry["report"], BuildReport)
        return dataclasses.replace(report, plan=str(output), unchanged=True)

    def remember(self, key: str | None, output: Path, report: BuildReport) -> None:
        """Notes what the build of this key gave."""
        if self.cache is None or key is None:
            return
        entry = {"sha256": self.hashes.sha256(output), "report": dataclasses.asdict(report)}
        self.cache.put(key, json.dumps(entry).encode())
        self.cache.prune()
