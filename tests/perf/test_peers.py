"""The table goes between its marks in a README, and nowhere else."""

from pathlib import Path

import pytest

from tests.perf.peers import replaced


def test_the_table_replaces_what_stands_between_the_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench -->\nold\n<!-- end of bench -->\nafter\n")
    assert replaced(readme, "bench", "| new |\n") == "before\n<!-- bench -->\n| new |\n<!-- end of bench -->\nafter\n"
    with pytest.raises(ValueError, match="no lines <!-- other --> and <!-- end of other -->"):
        replaced(readme, "other", "")
    readme.write_text("<!-- end of bench -->\n<!-- bench -->\n")
    with pytest.raises(ValueError, match="no lines"):
        replaced(readme, "bench", "")
