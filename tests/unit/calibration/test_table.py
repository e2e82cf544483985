"""The calibration table: bytes there and back, and refused when it is not one or of another checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.calibration import CalibrationData, CalibrationTable, Choice, Ranges, RoundedFile, read_table
from llmc.artifacts.errors import CheckpointError, UsageError

DATA = CalibrationData("written by the model itself", "b" * 64, 8, 2048, 0)
THIRD = float(np.float32(1 / 3))
TABLE = CalibrationTable(
    "a" * 64, "0.47.0", "max", DATA, {"m.b": Ranges(0.5, (THIRD, 0.0)), "m.a": Ranges(2.0, (3.0,))}
)
amax = st.floats(0, 2.0**127, width=32)


ROUNDED = CalibrationTable(
    "a" * 64,
    "0.47.0",
    "compensated",
    DATA,
    {
        "m.a": Ranges(2.0, (3.0,), Choice(True, 0.25, THIRD, 0.0)),
        "m.b": Ranges(0.5, (THIRD,), Choice(False, 0.0, 1.0, THIRD)),
    },
    "static",
    1.1,
    RoundedFile("table.safetensors", "f" * 64),
)


def test_choices_read_back_the_same() -> None:
    assert CalibrationTable.from_json(ROUNDED.to_json()) == ROUNDED
    assert CalibrationTable.from_json(ROUNDED.to_json()).to_json() == ROUNDED.to_json()
    int4 = dataclasses.replace(ROUNDED, weights="int4")
    assert CalibrationTable.from_json(int4.to_json()) == int4
    head = dataclasses.replace(int4, head="m.b")
    assert CalibrationTable.from_json(head.to_json()) == head
    assert (TABLE.version, ROUNDED.version, int4.version, head.version) == (1, 2, 3, 4)


@pytest.mark.parametrize("head", [None, "m.a"])
def test_inputs_that_are_kept_read_back_the_same(head: str | None) -> None:
    kept = {"m.b": Ranges(0.5, (THIRD,), Choice(False, 0.0, 1.0, THIRD, input_kept=True))}
    table = dataclasses.replace(ROUNDED, activations="token", tensors={**ROUNDED.tensors, **kept}, head=head)
    assert table.version == 5
    assert CalibrationTable.from_json(table.to_json()) == table
    broken = table.to_json().replace(b'"input_kept":true', b'"input_kept":1')
    with pytest.raises(UsageError, match=r"m\.b\.input_kept is 1, expected true or false"):
        CalibrationTable.from_json(broken)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activations": "dynamic"}, "activations is 'dynamic', expected token, static, none"),
        ({"version": 3}, "weights is None, expected str"),
        ({"version": 3, "weights": "int3"}, "weights is 'int3', expected fp8, int8, int4"),
        ({"version": 4, "weights": "int4", "head": 1}, "head is 1, expected str"),
        ({"budget": "1.1"}, "budget is '1.1', expected a number"),
        ({"rounded": None}, "rounded is None"),
        ({"rounded": {"file": "../t.safetensors", "sha256": ""}}, "expected the name of a file beside the table"),
        ({"tensors": {"m.a": {"input_amax": 1, "weight_amax": [1]}}}, r"m\.a\.kept is None"),
        ({"tensors": {"m.a": {"kept": True, "input_amax": 1, "weight_amax": [1]}}}, r"m\.a\.loss is None"),
    ],
)
def test_a_damaged_choice_is_named(changes: dict[str, Any], words: str) -> None:
    raw = json.dumps(json.loads(ROUNDED.to_json()) | changes).encode()
    with pytest.raises(UsageError, match=words):
        CalibrationTable.from_json(raw)


@given(st.dictionaries(st.text(), st.builds(Ranges, amax, st.lists(amax, min_size=1).map(tuple))))
def test_every_table_reads_back_the_same(tensors: dict[str, Ranges]) -> None:
    table = CalibrationTable("a" * 64, "0.47.0", 'say "max"', DATA, tensors)
    assert CalibrationTable.from_json(table.to_json()) == table


def test_bytes_do_not_depend_on_the_order_of_modules() -> None:
    turned = CalibrationTable("a" * 64, "0.47.0", "max", DATA, dict(reversed(list(TABLE.tensors.items()))))
    assert turned.to_json() == TABLE.to_json()
    assert b'"m.a": {"input_amax":2.0,"weight_amax":[3.0]},\n' in TABLE.to_json()


def test_a_table_of_another_checkpoint_is_refused_with_both_digests() -> None:
    TABLE.check("a" * 64)
    with pytest.raises(CheckpointError, match=r"a{64}.*c{64}"):
        TABLE.check("c" * 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 6}, "version 6, this llmc reads versions 1 to 5"),
        ({"checkpoint": 7}, "checkpoint is 7"),
        ({"data": None}, "data is None"),
        ({"data": {"source": "x"}}, "sha256 is None"),
        ({"tensors": []}, "tensors is"),
        ({"tensors": {"m.a": 1}}, "m.a"),
        ({"tensors": {"m.a": {"input_amax": -1, "weight_amax": [1]}}}, r"m\.a\.input_amax is -1"),
        ({"tensors": {"m.a": {"input_amax": float("nan"), "weight_amax": [1]}}}, r"m\.a\.input_amax is nan"),
        ({"tensors": {"m.a": {"input_amax": 1, "weight_amax": []}}}, "weight_amax is empty"),
        ({"tensors": {"m.a": {"input_amax": 1, "weight_amax": ["1"]}}}, r"m\.a\.weight_amax is '1'"),
    ],
)
def test_a_damaged_field_is_named(changes: dict[str, Any], words: str) -> None:
    raw = json.dumps(json.loads(TABLE.to_json()) | changes).encode()
    with pytest.raises(UsageError, match=words):
        CalibrationTable.from_json(raw)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"a": 1}', b"\xff"])
def test_other_files_are_no_tables(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes(raw)
    with pytest.raises(UsageError, match=r"table\.json"):
        read_table(tmp_path / "table.json")
    with pytest.raises(UsageError, match=r"nowhere\.json: cannot be read"):
        read_table(tmp_path / "nowhere.json")
