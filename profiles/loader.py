"""Shape profiles: which steps an engine is compiled for, and what its requests may need.

Comes in: a profile's name or a YAML file, the model's longest context, the target. Goes out: `ShapeProfile`, checked.
Must not know: anything else of the model, the live machine.

    token_ranges:                     # code is compiled for each range and tuned for its opt; from 1 on, without gaps
      - {min: 1, opt: 1, max: 1}
      - {min: 2, opt: 64, max: 512}   # opt may be left out: max
    max_num_seqs: 64                  # sequences in flight; default: 64, or the largest step where that is smaller
    max_seq_len: auto                 # prompt and answer of one sequence; auto (the default): what the model can
    block_size: 16                    # tokens of a KV block; default: 16
    outside: reject                   # what happens to requests beyond this; nothing else exists
"""

from __future__ import annotations

from pathlib import Path

from llmc.artifacts.errors import UsageError
from llmc.artifacts.schema import ShapeProfile, TokenRange
from llmc.profiles.reading import Fields, suggestion
from llmc.profiles.targets import TargetDescription

_FOLDER = Path(__file__).parent
_KEYS = ("token_ranges", "max_num_seqs", "max_seq_len", "block_size", "outside")
_DEFAULT_SEQS, _DEFAULT_BLOCK = 64, 16


def profile_names() -> list[str]:
    """The profiles that come with llmc."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_profile(
    name_or_path: str | Path,
    max_position_embeddings: int,
    target: TargetDescription,
    limited: bool = True,
    stretch: float = 1.0,
) -> ShapeProfile:
    """The profile of a name, or of a file (anything with a suffix or a slash). Not `limited`: the model takes sequences
    of any length, and `max_position_embeddings` is only what auto means. `stretch`: how many times as many a profile
    may ask for. Raises UsageError naming the field.
    """
    path = _locate(str(name_or_path))
    fields = Fields.read(path, _KEYS)
    ranges = _ranges(fields)
    profile = ShapeProfile(
        name=path.stem,
        token_ranges=ranges,
        max_num_seqs=fields.integer("max_num_seqs", min(_DEFAULT_SEQS, ranges[-1].max)),
        max_seq_len=_max_seq_len(fields, max_position_embeddings, limited, stretch),
        block_size=fields.integer("block_size", _DEFAULT_BLOCK),
        outside=fields.values.get("outside", "reject"),
    )
    if profile.max_num_seqs > ranges[-1].max:
        raise fields.fail("max_num_seqs", f"the largest step has {ranges[-1].max} tokens, so that many at most")
    if profile.block_size not in target.block_sizes:
        allowed = ", ".join(map(str, target.block_sizes))
        raise fields.fail("block_size", f"kernels of {target} have {allowed}")
    if profile.outside != "reject":
        raise fields.fail("outside", "only 'reject' exists")
    return profile


def _locate(name: str) -> Path:
    if "/" in name or Path(name).suffix:
        if not Path(name).is_file():
            raise UsageError(f"profile {name}: no such file; the names without a file are {', '.join(profile_names())}")
        return Path(name)
    if name not in profile_names():
        near = suggestion(name, profile_names())
        raise UsageError(f"profile {name!r} is neither a file nor one of {', '.join(profile_names())}{near}")
    return _FOLDER / f"{name}.yaml"


def _ranges(fields: Fields) -> tuple[TokenRange, ...]:
    items = fields.values.get("token_ranges")
    if not isinstance(items, list) or not items:
        raise fields.fail("token_ranges", "a list of {min, opt, max} is needed")
    ranges = []
    expected = 1
    for number, item in enumerate(items):
        one = Fields.of(item, f"{fields.where}: token_ranges[{number}]", ("min", "opt", "max"))
        least, most = one.integer("min"), one.integer("max")
        if least > most:
            raise UsageError(f"{one.where}: min {least} is larger than max {most}")
        if not least <= (opt := one.integer("opt", most)) <= most:
            raise one.fail("opt", f"it lies outside {least}..{most}")
        if least != expected:
            raise one.fail("min", f"ranges follow one another without gap or overlap: {expected} is needed here")
        expected = most + 1
        ranges.append(TokenRange(least, opt, most))
    return tuple(ranges)


def _max_seq_len(fields: Fields, longest: int, limited: bool, stretch: float) -> int:
    if fields.values.get("max_seq_len", "auto") == "auto":
        return longest
    if not isinstance(fields.values["max_seq_len"], int):
        raise fields.fail("max_seq_len", "a whole number, or auto for what the model can, is needed")
    wanted = fields.integer("max_seq_len")
    if wanted < 2:
        raise fields.fail("max_seq_len", "at least 2 are needed, for a prompt and an answer")
    if limited and wanted > int(longest * stretch):
        most = ", so that much at most"
        if stretch > 1:
            most = f" and its rope factor {stretch:g}: at most {int(longest * stretch)}"
        raise fields.fail("max_seq_len", f"the model's max_position_embeddings is {longest}{most}")
    return wanted
