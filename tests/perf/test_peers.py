"""The table goes between its marks in a README, and nowhere else."""

from pathlib import Path

import pytest

from tests.perf.peers import BEGIN, END, replace


def test_the_table_replaces_what_stands_between_the_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    replace(readme, "| new |\n")
    assert readme.read_text() == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"
    readme.write_text(f"{END}\n{BEGIN}\n")
    with pytest.raises(ValueError, match=r"README\.md has no lines"):
        replace(readme, "")
