"""What Prometheus reads at /metrics: vLLM's names under the prefix `llmc:`.

Comes in: the core's `Stats` (counters and gauges, read when scraped) and the front end's events (histograms).
Goes out: metric families. Must not know: HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from llmc.runtime.front import FrontEnd, Observer, Times
from llmc.runtime.messages import STEP_TOKENS
from llmc.runtime.sequence import Sequence
from llmc.runtime.server.histogram import Histogram, cumulative
from llmc.runtime.server.slo import Slo

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
HISTOGRAMS = {
    "time_to_first_token_seconds": (TTFT, "Seconds from a sequence's submission to its first token."),
    "inter_token_latency_seconds": (ITL, "Seconds between tokens of a sequence."),
    "request_time_per_output_token_seconds": (ITL, "Mean seconds between a sequence's tokens."),
    "e2e_request_latency_seconds": (E2E, "Seconds from a sequence's submission to its end."),
    "request_queue_time_seconds": (E2E, "Seconds that a sequence waited to be admitted."),
    "request_inference_time_seconds": (E2E, "Seconds from a sequence's admission to its end."),
    "request_prefill_time_seconds": (E2E, "Seconds from a sequence's admission to its first token."),
    "request_decode_time_seconds": (E2E, "Seconds from a sequence's first token to its last."),
    "request_prompt_tokens": (TOKENS, "Prompt tokens of finished sequences."),
    "request_generation_tokens": (TOKENS, "Generated tokens of finished sequences."),
}
#: Counters that the core keeps: name, field of Stats, help.
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens processed."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "preemptions_copied": ("preemptions_copied", "Preempted sequences whose blocks were copied to host memory."),
    "prefix_cache_evictions": ("evictions", "Blocks that the prefix cache gave up."),
    "prefix_cache_evicted_lifetime_seconds": ("evicted_lifetime_seconds", "Seconds that evicted blocks were findable."),
    "prefix_cache_evicted_idle_seconds": ("evicted_idle_seconds", "Seconds since evicted blocks were last used."),
    "num_preemptions": ("preemptions", "Sequences put back to wait for lack of blocks."),
    "engine_steps": ("steps", "Steps of the engine."),
    "engine_step_seconds": ("step_seconds", "Seconds spent in steps."),
    "engine_schedule_seconds": ("schedule_seconds", "Seconds spent composing steps."),
    "engine_gap_seconds": ("gap_seconds", "Seconds between two steps in which the ranks waited for the core."),
    "engine_step_tokens": ("step_tokens_sum", "Tokens of all steps; over steps and max_num_batched_tokens: how full."),
    "engine_step_sequences": ("step_sequences", "Sequences of all steps; over steps and max_num_seqs: how full."),
}
REASONS = ("stop", "length", "abort", "error")
#: What a response's status says about a request that was not taken.
REJECTIONS = {
    400: "invalid",
    401: "unauthorized",
    404: "not_found",
    413: "body_too_large",
    503: "not_ready",
}


class Metrics(Observer, Collector):
    """Observes a front end, and is scraped. `info` labels describe the plan."""

    def __init__(self, model_name: str, info: dict[str, str], slo: Slo | None = None) -> None:
        self.front: FrontEnd | None = None
        self._model = model_name
        self._info = info
        self._slo = slo
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._good = 0
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._between = self._histograms["inter_token_latency_seconds"]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def on_tokens(self, seconds: float, count: int, first: bool) -> None:
        """See Observer. Tokens that came together share the time since the last ones."""
        if not first:
            self._between.observe(seconds / count, count)

    def on_finish(self, sequence: Sequence, times: Times) -> None:
        """See Observer."""
        reason = sequence.finish_reason or "error"
        self._finished[reason] += 1
        later = sequence.completion_tokens - 1
        tpot = None if times.first is None or later < 1 else (times.last - times.first) / later
        found: dict[str, float | None] = {
            "e2e_request_latency_seconds": times.end,
            "request_prompt_tokens": sequence.prompt_tokens,
            "request_generation_tokens": sequence.completion_tokens,
            "request_time_per_output_token_seconds": tpot,
        }
        if times.first is not None:
            found |= {
                "time_to_first_token_seconds": times.first,
                "request_queue_time_seconds": times.queued,
                "request_inference_time_seconds": times.end - times.queued,
                "request_prefill_time_seconds": times.first - times.queued,
                "request_decode_time_seconds": times.last - times.first,
            }
        for name, value in found.items():
            if value is not None:
                self._histograms[name].observe(value)
        if self._slo is not None and reason != "abort":
            missed = self._slo.missed({"ttft": times.first, "tpot": tpot, "e2el": times.end})
            self._missed.update(["error"] if reason == "error" else missed)
            self._good += reason != "error" and not missed

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
        for name, histogram in self._histograms.items():
            yield self._histogram(name, HISTOGRAMS[name][1], histogram.buckets(), histogram.sum)
        stats = self.front.stats if self.front else None
        if stats is not None and stats.step_tokens:
            text = "Tokens of the engine's steps."
            yield self._histogram(
                "iteration_tokens_total", text, cumulative(STEP_TOKENS, stats.step_tokens), stats.step_tokens_sum
            )

    def _histogram(self, name: str, text: str, buckets: list[tuple[str, float]], total: float) -> Metric:
        family = HistogramMetricFamily(f"llmc:{name}", text, labels=["model_name"])
        family.add_metric([self._model], buckets, total)
        return family

    def _gauges(self) -> Iterator[Metric]:
        stats = self.front.stats if self.front else None
        used = stats.blocks_used / stats.blocks_total if stats and stats.blocks_total else 0.0
        ready = self.front is not None and self.front.not_ready() is None
        core = self.front.core if self.front else None
        for name, text, value in (
            ("num_requests_running", "Sequences in execution.", stats.running if stats else 0),
            ("num_requests_waiting", "Sequences that wait to be admitted.", stats.waiting if stats else 0),
            ("kv_cache_usage_perc", "Share of the KV blocks in use; 1 means all.", used),
            ("kv_blocks_cached", "KV blocks that the prefix cache can find.", stats.blocks_cached if stats else 0),
            (
                "kv_host_blocks_used",
                "Blocks of preempted sequences in host memory.",
                stats.host_blocks_used if stats else 0,
            ),
            ("max_num_seqs", "Sequences that a step takes at most.", core.max_num_seqs if core else 0),
            ("max_num_batched_tokens", "Tokens that a step takes at most.", core.max_num_batched_tokens if core else 0),
            ("engine_ready", "1 while generation works.", int(ready)),
        ):
            yield self._one(GaugeMetricFamily, name, text, value)
        text = "Blocks that the prefix cache has evicted to a lower tier, where they are now."
        tiers = stats.shelf_blocks if stats else {}
        yield self._labelled(GaugeMetricFamily, "prefix_cache_tier_blocks", text, "tier", tiers)
        yield self._labelled(
            GaugeMetricFamily,
            "num_requests_waiting_by_priority",
            "Sequences that wait, by priority class.",
            "priority",
            stats.waiting_by_class if stats else {},
        )

    def _counters(self) -> Iterator[Metric]:
        stats = self.front.stats if self.front else None
        for name, (field, text) in COUNTERS.items():
            yield self._one(CounterMetricFamily, name, text, getattr(stats, field) if stats else 0)
        ended = {reason: self._finished[reason] for reason in REASONS}
        text = "Sequences that ended, by reason."
        yield self._labelled(CounterMetricFamily, "request_success", text, "finished_reason", ended)
        for name, of, text in (
            ("external_prefix_cache_hits", "shelf_hits", "Prompt tokens that came back from a lower tier."),
            ("prefix_cache_tier_evictions", "shelf_evictions", "Blocks that a lower tier of the prefix cache gave up."),
            ("prefix_cache_tier_damaged", "shelf_damaged", "Blocks of a lower tier that could not be read back."),
            (
                "prefix_cache_tier_refused",
                "shelf_refused",
                "Blocks that came too fast for a lower tier.",
            ),
        ):
            yield self._labelled(CounterMetricFamily, name, text, "tier", getattr(stats, of) if stats else {})
        turned_away = {reason: self._rejected[reason] for reason in REJECTIONS.values()}
        turned_away |= stats.rejections if stats else {}
        text = "Requests that were not taken, by reason."
        yield self._labelled(CounterMetricFamily, "admission_rejections", text, "reason", turned_away)
        if self._slo is not None:
            text = "Sequences that met every level of --slo."
            yield self._one(CounterMetricFamily, "goodput_requests", text, self._good)
            missed = {name: self._missed[name] for name in (*self._slo.limits, "error")}
            text = "Sequences that missed a level of --slo, by level; those that failed as error."
            yield self._labelled(CounterMetricFamily, "slo_violations", text, "slo", missed)

    def _one(self, family: Callable[..., Metric], name: str, text: str, value: float) -> Metric:
        metric = family(f"llmc:{name}", text, labels=["model_name"])
        metric.add_metric([self._model], value)  # type: ignore[attr-defined]
        return metric

    def _labelled(
        self, family: Callable[..., Metric], name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        metric = family(f"llmc:{name}", text, labels=["model_name", label])
        for key, value in values.items():
            metric.add_metric([self._model, key], value)  # type: ignore[attr-defined]
        return metric
