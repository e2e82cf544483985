"""No kernel needs more instructions than it did: the guard of speed that a busy machine cannot disturb.

Neither valgrind nor a certain g++ can be asked of every machine that runs the tests: the package index has no valgrind,
and `make install` installs nothing beside the virtual environment. Where kernels are not guarded, the summary says so.
"""

import json
import shutil
import warnings
from typing import NoReturn

import pytest

from tests.perf.instructions import CONTEXT, ISA, RECORD, WINDOW, count, toolchain
from tests.unit.plugins.compiled import ISAS

#: How many more are no slower kernel: another order of instructions, another constant.
TOLERANCE = 0.05


def _not_guarded(reason: str) -> NoReturn:
    """Warnings stand in the summary, skipped tests do not."""
    warnings.warn(UserWarning(f"the instructions of kernels are NOT counted: {reason}"), stacklevel=2)
    pytest.skip(reason)


def test_kernels_need_no_more_instructions_than_recorded() -> None:
    record = json.loads(RECORD.read_text())
    if ISA not in ISAS:
        _not_guarded(f"this machine does not run {ISA}")
    if shutil.which("valgrind") is None:
        _not_guarded("valgrind, which counts them, is not installed (apt-get install valgrind)")
    if (found := toolchain()) != record["g++"]:
        _not_guarded(f"recorded with g++ {record['g++']}, this is {found}: its code has other counts")
    counts = count()
    assert set(counts) == set(record["counts"])
    worse = {
        name: f"{number:,} instructions, {record['counts'][name]:,} recorded"
        for name, number in counts.items()
        if number > record["counts"][name] * (1 + TOLERANCE)
    }
    assert not worse, "if it is meant so: python -m tests.perf.instructions --record"
    # What is counted grows with the work: a guard that looks at the wrong place would not notice.
    assert counts["linear f8e4m3, 64 rows"] > 5 * counts["linear f8e4m3, 4 rows"] > 5 * counts["rms_norm, 64 rows"]
    for tokens in ("1 token", "64 tokens"):
        whole = f"paged_attention bf16, {tokens} of {CONTEXT}"
        assert counts[f"{whole}, window {WINDOW}"] < counts[whole] / 2


@pytest.mark.parametrize(
    ("valgrind", "version", "words"),
    [(None, "12.2.0", "valgrind, which counts them"), ("/bin/true", "0.1", "this is 0.1")],
)
def test_what_is_not_guarded_is_said_in_the_summary(
    monkeypatch: pytest.MonkeyPatch, valgrind: str | None, version: str, words: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: valgrind)
    monkeypatch.setattr("tests.perf.test_instructions.toolchain", lambda: version)
    with pytest.warns(UserWarning, match=f"NOT counted: .*{words}"), pytest.raises(pytest.skip.Exception):
        test_kernels_need_no_more_instructions_than_recorded()
