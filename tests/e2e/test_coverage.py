"""The record of model types is true: whatever it says works is built and compared again; the README says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.coverage import WORKS, Record, check_families

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- llmc models --summary -->\n", "<!-- end of llmc models --summary -->\n"
RECORD = Record.read()
WORKING = [row.model_type for row in RECORD.models if row.status == WORKS]


@pytest.mark.timeout(1800)
def test_what_the_record_says_works_works() -> None:
    """All in one go, as the checks share two processes; a failure names every type that differs."""
    results = check_families(WORKING, workers=2)
    assert {row.model_type: row.reason for row in results if row.status != WORKS} == {}
    known = {row.model_type: row for row in RECORD.models}
    launches = {row.model_type: row.launches_per_layer for row in results}
    assert launches == {name: known[name].launches_per_layer for name in WORKING}


def test_the_readme_carries_the_summary() -> None:
    text = (ROOT / "README.md").read_text()
    assert BEGIN in text, f"README.md lacks the line {BEGIN.strip()}"
    assert text.partition(BEGIN)[2].partition(END)[0] == RECORD.summary(), (
        "README.md is not what `llmc models --summary` prints; put its output between the two comments"
    )


def test_the_record_is_of_the_release_that_is_installed() -> None:
    from importlib.metadata import version

    assert RECORD.transformers == version("transformers")
