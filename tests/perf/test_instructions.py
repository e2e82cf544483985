"""No kernel needs more instructions than it did: the guard of speed that a busy machine cannot disturb."""

import json
import shutil

import pytest

from tests.perf.instructions import ISA, RECORD, count, toolchain
from tests.unit.plugins.compiled import ISAS

#: How many more are no slower kernel: another order of instructions, another constant.
TOLERANCE = 0.05


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed: it counts the instructions")
@pytest.mark.skipif(ISA not in ISAS, reason=f"this machine does not run {ISA}")
def test_kernels_need_no_more_instructions_than_recorded() -> None:
    record = json.loads(RECORD.read_text())
    if (found := toolchain()) != record["g++"]:
        pytest.skip(f"recorded with g++ {record['g++']}, this is {found}: its code has other counts")
    counts = count()
    assert set(counts) == set(record["counts"])
    worse = {
        name: f"{number:,} instructions, {record['counts'][name]:,} recorded"
        for name, number in counts.items()
        if number > record["counts"][name] * (1 + TOLERANCE)
    }
    assert not worse, "if it is meant so: python -m tests.perf.instructions --record"
    # What is counted grows with the work: a guard that looks at the wrong place would not notice.
    assert counts["linear f8e4m3, 64 rows"] > 5 * counts["linear f8e4m3, 4 rows"] > 5 * counts["rms_norm, 4 rows"]
