"""What Prometheus reads at /metrics: vLLM's names under the prefix `llmc:`.

Comes in: the core's `Stats` (counters and gauges, read when scraped) and the front end's events (histograms).
Goes out: metric families. Must not know: HTTP.

Histograms are lists of counts: recording one value costs a bisection, because it happens for every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from llmc.runtime.front import FrontEnd, Observer
from llmc.runtime.sequence import Sequence

# vLLM's buckets; those of single tokens start at 1 ms instead of 10, which fast engines are below.
TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
REASONS = ("stop", "length", "abort", "error")
#: What a response's status says about a request that was not taken.
REJECTIONS = {
    400: "invalid",
    401: "unauthorized",
    404: "not_found",
    413: "body_too_large",
    429: "queue_full",
    503: "not_ready",
}


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Records a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them."""
        total = 0
        found = []
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((str(bound), float(total)))
        return found


class Metrics(Observer, Collector):
    """Observes a front end, and is scraped. `info` labels describe the plan."""

    def __init__(self, model_name: str, info: dict[str, str]) -> None:
        self.front: FrontEnd | None = None
        self._model = model_name
        self._info = info
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._histograms = {
            "time_to_first_token_seconds": (
                Histogram(TTFT),
                "Seconds from a sequence's submission to its first token.",
            ),
            "inter_token_latency_seconds": (Histogram(ITL), "Seconds between tokens of a sequence."),
            "e2e_request_latency_seconds": (Histogram(E2E), "Seconds from a sequence's submission to its end."),
            "request_prompt_tokens": (Histogram(TOKENS), "Prompt tokens of finished sequences."),
            "request_generation_tokens": (Histogram(TOKENS), "Generated tokens of finished sequences."),
        }
        self._first, self._between, self._e2e, self._prompt, self._generated = (
            histogram for histogram, _ in self._histograms.values()
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def on_tokens(self, seconds: float, count: int, first: bool) -> None:
        """See Observer. Tokens that came together share the time since the last ones."""
        if first:
            self._first.observe(seconds)
        else:
            self._between.observe(seconds / count, count)

    def on_finish(self, sequence: Sequence, seconds: float) -> None:
        """See Observer."""
        self._finished[sequence.finish_reason or "error"] += 1
        self._e2e.observe(seconds)
        self._prompt.observe(sequence.prompt_tokens)
        self._generated.observe(sequence.completion_tokens)

    def on_response(self, path: str, status: int) -> None:
        """A request for `path` has been answered with `status`; those for completions are counted."""
        if path.endswith("/completions") and status in REJECTIONS:
            self._rejected[REJECTIONS[status]] += 1

    def scrape(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: says to the registry that names need no check."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        plan = InfoMetricFamily("llmc:plan", "What is served.")
        plan.add_metric([], self._info)
        yield plan
        yield from self._gauges()
        yield from self._counters()
        for name, (histogram, text) in self._histograms.items():
            family = HistogramMetricFamily(f"llmc:{name}", text, labels=["model_name"])
            family.add_metric([self._model], histogram.buckets(), histogram.sum)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        stats = self.front.stats if self.front else None
        used = stats.blocks_used / stats.blocks_total if stats and stats.blocks_total else 0.0
        ready = self.front is not None and self.front.not_ready() is None
        for name, text, value in (
            ("num_requests_running", "Sequences in execution.", stats.running if stats else 0),
            ("num_requests_waiting", "Sequences that wait to be admitted.", stats.waiting if stats else 0),
            ("kv_cache_usage_perc", "Share of the KV blocks in use; 1 means all.", used),
            ("engine_ready", "1 while generation works.", int(ready)),
        ):
            yield self._one(GaugeMetricFamily, name, text, value)

    def _counters(self) -> Iterator[Metric]:
        stats = self.front.stats if self.front else None
        for name, text, field in (
            ("prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
            ("generation_tokens", "Tokens generated.", "generation_tokens"),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
            ("num_preemptions", "Sequences put back to wait for lack of blocks.", "preemptions"),
            ("engine_steps", "Steps of the engine.", "steps"),
            ("engine_step_seconds", "Seconds spent in steps.", "step_seconds"),
        ):
            yield self._one(CounterMetricFamily, name, text, getattr(stats, field) if stats else 0)
        success = CounterMetricFamily(
            "llmc:request_success", "Sequences that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in REASONS:
            success.add_metric([self._model, reason], self._finished[reason])
        yield success
        rejected = CounterMetricFamily(
            "llmc:admission_rejections", "Requests that were not taken, by reason.", labels=["model_name", "reason"]
        )
        for reason in REJECTIONS.values():
            rejected.add_metric([self._model, reason], self._rejected[reason])
        yield rejected

    def _one(self, family: Callable[..., Metric], name: str, text: str, value: float) -> Metric:
        metric = family(f"llmc:{name}", text, labels=["model_name"])
        metric.add_metric([self._model], value)  # type: ignore[attr-defined]
        return metric
