"""The plan file: written once, mapped for reading, refused when anything about it is off.

Comes in: sections (bytes), a `Manifest`. Goes out: `engine.plan`, and from one a `Plan` whose sections are views of the
mapped file. Must not know: what the sections mean.

The file is a zip with stored members whose bytes start on page boundaries: `unzip -l` lists it and mmap maps it.
manifest.json comes last and carries every other member's offset, size and BLAKE3 hash, a tree that several processors
work out at once, each four times as fast as SHA-256; the SHA-256 of its own bytes is the plan's digest. Times and
permissions are fixed: the same inputs give the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Self

import msgspec
from blake3 import blake3

from llmc.artifacts.errors import EnvironmentFault, PlanError
from llmc.artifacts.files import disk_errors, temporary_beside
from llmc.artifacts.machine import usable_cpus
from llmc.artifacts.schema import FORMAT_VERSION, Manifest, Section

PAGE = 4096
MANIFEST = "manifest.json"
_PADDING_ID = 0xD935  # the extra-field id that zip alignment tools use
_LOCAL_HEADER = 30
_ZIP64_EXTRA = 20
_DOS_EPOCH = (1980, 1, 1, 0, 0, 0)


class SectionSink:
    """What a section's bytes are written to: hashes on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = blake3()
        self.size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends bytes to the section."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hash.update(view)
        self.size += len(view)

    def align(self, boundary: int) -> int:
        """Pads with zeros to a multiple of `boundary`; returns the offset in the section."""
        self.write(bytes(-self.size % boundary))
        return self.size

    def digest(self) -> str:
        """The BLAKE3 hash of what is written so far."""
        return self._hash.hexdigest()


class PlanWriter:
    """Writes a plan beside its final path; nothing stands there until `publish` renames it.

    with PlanWriter(path) as writer:
        with writer.section("code/rank0.so") as sink:
            sink.write(data)
        writer.seal(manifest)                   # a complete plan at writer.temporary
        writer.amend({"golden.json": data})     # optional, more sections
        writer.publish()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = temporary_beside(path)
        self._sections: list[Section] = []
        self._manifest: Manifest | None = None
        with disk_errors(self.temporary):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._zip = zipfile.ZipFile(self.temporary, "w", zipfile.ZIP_STORED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._zip.fp is not None:
            # A full disk also fails the central directory; the file goes away next, so that error says nothing new.
            with contextlib.suppress(OSError, ValueError):
                self._zip.close()
        self.temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[SectionSink]:
        """Adds a member; raises EnvironmentFault when the disk is full."""
        with self._member(name) as (offset, sink):
            yield sink
        self._sections.append(Section(name, offset, sink.size, sink.digest()))

    def add(self, name: str, data: bytes) -> None:
        """Adds a member of known bytes."""
        with self.section(name) as sink:
            sink.write(data)

    @contextlib.contextmanager
    def _member(self, name: str) -> Iterator[tuple[int, SectionSink]]:
        info = zipfile.ZipInfo(name, _DOS_EPOCH)
        info.external_attr = 0o644 << 16
        info.create_system = 3
        start = self._zip.start_dir + _LOCAL_HEADER + len(name.encode()) + _ZIP64_EXTRA + 4
        padding = -start % PAGE
        info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
        with disk_errors(self.temporary), self._zip.open(info, "w", force_zip64=True) as file:
            yield start + padding, SectionSink(file)
        info.extra = b""  # the directory at the end needs no padding

    def seal(self, manifest: Manifest) -> Manifest:
        """Completes the file with the manifest, whose `sections` are filled in here."""
        self._manifest = dataclasses.replace(manifest, sections=tuple(self._sections))
        with disk_errors(self.temporary):
            with self._member(MANIFEST) as (_, sink):
                sink.write(encode_manifest(self._manifest))
            self._zip.close()
        return self._manifest

    def amend(self, sections: Mapping[str, bytes]) -> Manifest:
        """Adds sections to a sealed file and seals it anew."""
        if self._manifest is None:
            raise ValueError("amend() needs a sealed plan")
        with disk_errors(self.temporary):
            self._zip = zipfile.ZipFile(self.temporary, "a", zipfile.ZIP_STORED)
            old = self._zip.NameToInfo.pop(MANIFEST)
            self._zip.filelist.remove(old)
            self._zip.start_dir = old.header_offset  # the next member overwrites the manifest and the directory
            assert self._zip.fp is not None
            self._zip.fp.truncate(old.header_offset)
            for name, data in sections.items():
                self.add(name, data)
        return self.seal(self._manifest)

    def publish(self) -> Path:
        """Moves the sealed file to its path, in one step."""
        with disk_errors(self.temporary):
            with self.temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(self.temporary, self.path)
        return self.path


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: indented, keys in the order of the schema."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


class Plan:
    """An open plan: `manifest`, `digest` (SHA-256 of the manifest's bytes), sections as views of the mapped file."""

    def __init__(self, path: Path, manifest: Manifest, digest: str, file: IO[bytes]) -> None:
        self.path = path
        self.manifest = manifest
        self.digest = digest
        self._file = file  # stays open: another file may take the path
        self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._sections = {section.name: section for section in manifest.sections}

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Plan:
        """Maps a plan; raises PlanError when it is missing, truncated, of another format or (with `verify`) altered."""
        path = Path(path)
        file, raw = _read_manifest(path)
        plan = cls(path, _decode_manifest(path, raw), hashlib.sha256(raw).hexdigest(), file)
        plan._check_layout()
        if verify:
            plan.require_unaltered()
        return plan

    def __contains__(self, name: str) -> bool:
        return name in self._sections

    @property
    def descriptor(self) -> int:
        """The open file, for processes that map parts of it themselves."""
        return self._file.fileno()

    def section(self, name: str) -> memoryview:
        """A section's bytes, not copied; raises PlanError if there is none of that name."""
        entry = self.entry(name)
        return memoryview(self._data)[entry.offset : entry.offset + entry.size]

    def entry(self, name: str) -> Section:
        """Where a section lies; raises PlanError if there is none of that name."""
        try:
            return self._sections[name]
        except KeyError:
            raise PlanError(f"{self.path}: has no section {name!r}; rebuild it with this version of llmc") from None

    def require_unaltered(self, but: tuple[str, ...] = ()) -> None:
        """Raises PlanError naming the sections whose bytes do not match the manifest. Those whose names begin with one
        of `but` are passed over: somebody else checks them.
        """
        if bad := self.altered_sections(but):
            raise PlanError(
                f"{self.path}: section {', '.join(bad)} does not match its hash in the manifest: the file was "
                f"altered or damaged. Copy it again or rebuild it"
            )

    def altered_sections(self, but: tuple[str, ...] = ()) -> list[str]:
        """Names of the sections whose bytes do not match the manifest, without those that begin with one of `but`."""
        sections = [section for section in self.manifest.sections if not section.name.startswith(but)]
        return [section.name for section in sections if self._hash(section) != section.blake3]

    def _hash(self, section: Section) -> str:
        # Starting threads takes longer than hashing a small section.
        threads = usable_cpus() if section.size > 1 << 20 else 1
        return blake3(self.section(section.name), max_threads=threads).hexdigest()

    def _check_layout(self) -> None:
        for section in self.manifest.sections:
            if section.offset % PAGE or section.offset + section.size > len(self._data):
                raise PlanError(
                    f"{self.path}: section {section.name!r} at byte {section.offset} of {section.size} bytes does not "
                    f"fit the file of {len(self._data)} bytes: it is truncated. Copy it again or rebuild it"
                )

    def check_machine(self) -> None:
        """Raises EnvironmentFault unless this machine has every CPU feature that the plan's code uses."""
        have = machine_features()
        missing = [feature for feature in self.manifest.target.features if feature not in have]
        if missing:
            target = self.manifest.target
            raise EnvironmentFault(
                f"{self.path}: was built for {target.kind}:{target.isa}, and this machine lacks {', '.join(missing)}. "
                f"Serve it elsewhere, or rebuild it with --target {target.kind}:<a level that this machine has>"
            )


def _read_manifest(path: Path) -> tuple[IO[bytes], bytes]:
    try:
        file = path.open("rb")
        with zipfile.ZipFile(file) as archive:
            raw = archive.read(MANIFEST)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such file; `llmc build -o {path}` writes one") from None
    except (zipfile.BadZipFile, KeyError, EOFError, struct.error, NotImplementedError, ValueError) as error:
        raise PlanError(
            f"{path}: is not a complete plan ({error}): truncated, damaged, or another kind of file"
        ) from error
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    return file, raw


def _decode_manifest(path: Path, raw: bytes) -> Manifest:
    try:
        head = msgspec.json.decode(raw)
        number = head["format"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise PlanError(f"{path}: {MANIFEST} cannot be read ({error}); rebuild the plan") from error
    if number != FORMAT_VERSION:
        remedy = "update llmc" if isinstance(number, int) and number > FORMAT_VERSION else "rebuild the plan"
        raise PlanError(f"{path}: has format {number}, this llmc reads format {FORMAT_VERSION}; {remedy}")
    try:
        return msgspec.convert(head, Manifest)
    except msgspec.ValidationError as error:
        raise PlanError(f"{path}: {MANIFEST} is not valid: {error}; rebuild the plan") from error


def machine_features() -> frozenset[str]:
    """The CPU flags of this machine, as /proc/cpuinfo names them; empty where there is no such file."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()
