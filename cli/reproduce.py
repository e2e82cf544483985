"""How a plan was built, as a command and as a build.yaml: what `llmc inspect --command` and `--config` print; and with
which tactics, for all that it prints.

Comes in: an open plan. Goes out: text. Must not know: how plans are built. Where a path stood, the plan knows a name:
the text asks for a file or folder of that name in the current folder, and comments say which one is meant.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from llmc.artifacts.calibration import WEIGHTS, CalibrationTable
from llmc.artifacts.kv_scales import KVScaleTable
from llmc.artifacts.plan import Plan

TABLE, KV_SCALES = "calibration.json", "kv_scales.json"
#: What a manifest says of FP8 scales that this compiler chose.
OWN_SCALES = "llmc's"


def command(plan: Plan) -> str:
    """Comments, and one line of shell."""
    words = ["llmc", "build"]
    for name, value in options(plan).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return "\n".join([*_comments(plan), shlex.join(words)]) + "\n"


def config(plan: Plan) -> str:
    """Comments, and the options as YAML."""
    return "\n".join([*_comments(plan), yaml.safe_dump(options(plan), sort_keys=False).rstrip()]) + "\n"


def options(plan: Plan) -> dict[str, object]:
    """Options of `llmc build` by name, all that decide about the plan's bytes."""
    manifest = plan.manifest
    recorded = dict(manifest.build.config)
    precision = recorded.pop("precision")
    profile = str(recorded.pop("profile"))
    result: dict[str, object] = {"model": _model(plan)}
    result |= {precision: True} if precision in WEIGHTS else {"dtype": precision}
    result["profile"] = profile if _is_built_in(profile) else f"{profile}.yaml"
    if recorded.pop("fp8_scales", OWN_SCALES) != OWN_SCALES:
        del recorded["fp8_activations"]  # the checkpoint's, like its scales: not for the command line to say
    for name in ("int8_scales", "int4_scales", "kv_scales"):
        recorded.pop(name, None)
    recorded["kv_dtype"] = _KV_DTYPE.get(str(recorded["kv_dtype"]), recorded["kv_dtype"])
    for name, value in recorded.items():
        if value is not False:
            result[_OPTION.get(name, name).replace("_", "-")] = value
    if TABLE in plan:
        result["calib"] = TABLE
    result["output"] = plan.path.name
    return result


#: Names of the manifest that are called otherwise on the command line.
_OPTION = {"kv_dtype": "kv-cache-dtype"}
_KV_DTYPE = {"f8e4m3": "fp8"}


def _table(plan: Plan, where: str) -> str:
    """Where the calibration table is to be had: out of the plan, but for weights that were rounded with it."""
    table = CalibrationTable.from_json(bytes(plan.section(TABLE)))
    if table.rounded is None:
        return f"{TABLE}: unzip -p {where} {TABLE} > {TABLE}"
    return (
        f"{TABLE}: the table of this build ({table.data.source}), beside it its rounded weights with sha256 "
        f"{table.rounded.sha256}: `llmc calibrate` writes both; without calib they are made again"
    )


def _model(plan: Plan) -> str:
    pin = plan.manifest.checkpoint
    return pin.files[0].name if pin.format == "gguf" else plan.manifest.model.name


def _is_built_in(profile: str) -> bool:
    from llmc.profiles.loader import profile_names

    return profile in profile_names()


def _comments(plan: Plan) -> list[str]:
    """Which files are meant, and what the same bytes take besides the options."""
    manifest = plan.manifest
    build, where = manifest.build, shlex.quote(str(plan.path))
    lines = [
        f"{_model(plan)}: the checkpoint with digest {manifest.checkpoint.digest}",
        f"the same bytes with {build.compiler}, {build.toolchain}, "
        + ", ".join(f"{name} {version}" for name, version in build.libraries.items()),
    ]
    if TABLE in plan:
        lines.append(_table(plan, where))
    if KV_SCALES in plan:
        kv = KVScaleTable.from_json(bytes(plan.section(KV_SCALES)))
        lines.append(f"scales of keys and values: {kv.source}{f', on {kv.data.source}' if kv.data else ''}")
    profile = manifest.profile
    if not _is_built_in(profile.name):
        content = {key: value for key, value in dataclasses.asdict(profile).items() if key != "name"}
        content["token_ranges"] = [dict(r) for r in content["token_ranges"]]
        text = yaml.safe_dump(content, default_flow_style=True, width=10_000, sort_keys=False).strip()
        lines.append(f"{profile.name}.yaml: {text}")
    if isinstance(name := build.config.get("tactics"), str):
        lines.append(f"{name}: {_numbers(manifest.target.kind, build.flags)}")
    if isinstance(text_name := build.config.get("eval"), str):
        lines.append(f"{text_name}: the text of quality.json")
    return [f"# {line}" for line in lines]


def tactics(plan: Plan) -> str | None:
    """The name of their file, or `default`, and the numbers. Of a GPU a plan has those that a file replaced; None where
    TensorRT chooses.
    """
    target, build = plan.manifest.target, plan.manifest.build
    if target.kind == "tensorrt":
        return None
    numbers = _numbers(target.kind, build.flags)
    name = build.config.get("tactics", "default")
    return f"{name}: {numbers}" if numbers != "{}" else f"{name}, of {target.kind}:{target.isa}"


def _numbers(kind: str, flags: Sequence[str]) -> str:
    """A file of tactics in a line of YAML, from what the compilers were told."""
    found: dict[str, Any] = {}
    mark = "-DLLMC_" if kind == "cpu" else "--tactic="
    for flag in flags:
        if flag.startswith(mark):
            name, _, value = flag.removeprefix(mark).lower().partition("=")
            *outer, key = name.split(".")
            numbers = found
            for part in outer:
                numbers = numbers.setdefault(part, {})
            numbers[key] = int(value)
    return yaml.safe_dump(found, default_flow_style=True, width=10_000, sort_keys=False).strip()
