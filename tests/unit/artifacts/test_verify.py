"""verify and lock: each file that differs is named."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmc.artifacts.errors import CheckpointError, PlanError
from llmc.artifacts.hashing import checkpoint_digest, hash_source
from llmc.artifacts.lock import pin_plan, read_lock
from llmc.artifacts.plan import Plan, PlanWriter
from llmc.artifacts.schema import CheckpointPin
from llmc.artifacts.verify import require_verified, verify_plan
from tests.unit.artifacts.test_plan import manifest

NAMES = ("config.json", "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(name.encode() * 50)
    return folder


@pytest.fixture
def plan(tmp_path: Path, model: Path) -> Path:
    files = tuple(hash_source(model, name) for name in NAMES)
    with PlanWriter(tmp_path / "engine.plan") as writer:
        writer.add("config.json", b"{}")
        writer.seal(manifest(checkpoint=CheckpointPin(checkpoint_digest(files), "huggingface", files)))
        return writer.publish()


def bad(findings: list) -> list[str]:
    return [f.subject for f in findings if not f.ok]


def test_everything_holds(plan: Path, model: Path, tmp_path: Path) -> None:
    lock = tmp_path / "llmc.lock"
    pin_plan(lock, Plan.open(plan))
    assert bad(verify_plan(plan, model, lock)) == []
    assert require_verified(plan, model, lock).manifest.abi == 1


def test_a_checkpoint_that_differs_by_one_byte_is_named(plan: Path, model: Path) -> None:
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    assert bad(verify_plan(plan, model)) == ["checkpoint file model.safetensors"]
    with pytest.raises(PlanError, match=r"model\.safetensors has sha256"):
        require_verified(plan, model)


def test_missing_and_resized_files_are_named(plan: Path, model: Path) -> None:
    (model / "config.json").unlink()
    (model / "model.safetensors").write_bytes(b"short")
    findings = [f for f in verify_plan(plan, model) if not f.ok]
    assert "is missing" in findings[0].detail
    assert "has 5 bytes" in findings[1].detail
    with pytest.raises(CheckpointError, match="no such file"):
        verify_plan(plan, model / "nowhere")


def test_the_digest_does_not_depend_on_order(model: Path) -> None:
    files = [hash_source(model, name) for name in NAMES]
    assert checkpoint_digest(files) == checkpoint_digest(reversed(files))
    assert checkpoint_digest(files) != checkpoint_digest([replace(files[0], sha256="0" * 64), files[1]])


def test_a_rebuilt_plan_does_not_match_its_lock(plan: Path, tmp_path: Path) -> None:
    lock = tmp_path / "llmc.lock"
    pin_plan(lock, Plan.open(plan))
    with PlanWriter(plan) as writer:
        writer.add("config.json", b"{ }")
        writer.seal(manifest())
        writer.publish()
    assert bad(verify_plan(plan, lock=lock)) == [
        "lock: plan digest",
        "lock: checkpoint digest",
        "lock: checkpoint file config.json",
        "lock: checkpoint file model.safetensors",
    ]


def test_a_lock_keeps_other_plans_and_names_missing_ones(plan: Path, tmp_path: Path) -> None:
    lock = tmp_path / "llmc.lock"
    pin_plan(lock, Plan.open(plan))
    other = plan.rename(tmp_path / "other.plan")
    assert "no entry for other.plan" in verify_plan(other, lock=lock)[-1].detail
    pin_plan(lock, Plan.open(other))
    assert list(read_lock(lock).plans) == ["engine.plan", "other.plan"]


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "plans": {"a": 3}}', '{"version": 9, "plans": {}}'])
def test_bad_lock_files(tmp_path: Path, text: str) -> None:
    lock = tmp_path / "llmc.lock"
    lock.write_text(text)
    with pytest.raises(PlanError, match="lock"):
        read_lock(lock)
