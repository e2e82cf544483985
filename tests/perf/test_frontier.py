"""The table puts both servers' runs of a load into one row, with the ratio of what they gave."""

from tests.perf.frontier import table


def _run(label: str, load: int, tokens: float) -> dict[str, object]:
    times = {"median_ttft_ms": 250.4, "median_tpot_ms": 12.34}
    return {"label": label, "max_concurrency": load, "output_throughput": tokens, **times}


def test_a_row_holds_both_servers_at_one_load() -> None:
    runs = [_run("ours", 1, 90.0), _run("theirs", 1, 45.0), _run("ours", 16, 300.0), _run("theirs", 16, 200.0)]
    head, _, *rows = table(runs).splitlines()
    assert head.startswith("| at once | ours: tokens/s | ours: TTFT ms | ours: TPOT ms | theirs: tokens/s |")
    assert rows == [
        "| 1 | 90.0 | 250 | 12.3 | 45.0 | 250 | 12.3 | 2.00x |",
        "| 16 | 300.0 | 250 | 12.3 | 200.0 | 250 | 12.3 | 1.50x |",
    ]
