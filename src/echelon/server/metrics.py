"""Prometheus metrics with vLLM's names, so that dashboards and benchmark clients made for it read them; the prefix can be switched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from echelon import metrics
from echelon.aio.limits import RequestObserver
from echelon.aio.request_handle import RequestRow
from echelon.llm import LLM
from echelon.sequence import FinishReason

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 600.0)
UNREAD_LIMITS = ("time", "buffers", "stream")  # a connection's write timeout, the memory of all buffers, that of one stream
KINDS = {metrics.Counter: CounterMetricFamily, metrics.Gauge: GaugeMetricFamily, metrics.Vector: CounterMetricFamily}


class EngineCollector:
    """Counters that the engine keeps anyway, read when they are asked for."""

    def __init__(self, llm: LLM, prefix: str, model: str) -> None:
        self._llm, self._prefix, self._model = llm, prefix, model

    def collect(self) -> Iterator[Metric]:
        """Read the engine's counters as metric families."""
        for family in metrics.families(self._llm.get_counters()):
            labels = ["model_name"] + ([family.label] if family.label else [])
            found: Any = KINDS[family.kind](self._prefix + family.name, family.description, labels=labels)
            for key, value in family.values.items():
                found.add_metric([self._model] + ([key] if family.label else []), value)
            yield cast(Metric, found)


class ServerMetrics(RequestObserver):
    """All metrics of a server. Labels come from fixed sets, so that no client can add a series."""

    def __init__(self, llm: LLM, prefix: str, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, prefix, model))

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(prefix + name, text, ["model_name"], registry=self._registry, buckets=SECONDS).labels(model)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between a row's steps.")
        self.time_per_output_token = histogram("request_time_per_output_token_seconds", "Decoding time a token, by request.")
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self.prompt_tokens = Counter(prefix + "prompt_tokens", "Prompt tokens.", ["model_name"], registry=self._registry).labels(model)
        finished = Counter(prefix + "request_success", "Finished sequences.", ["model_name", "finished_reason"], registry=self._registry)
        self._finished: dict[str, Counter] = {reason: finished.labels(model, reason) for reason in FinishReason}
        unread = Counter(prefix + "unread_cut", "Clients cut because they did not read.", ["model_name", "limit"], registry=self._registry)
        self.unread_cut = {limit: unread.labels(model, limit) for limit in UNREAD_LIMITS}

    def started(self, row: RequestRow) -> None:
        """Count a row that enters its first step."""
        self.queue_time.observe(row.started_at - row.arrived_at)
        self.prompt_tokens.inc(row.sequence.num_prompt_tokens)

    def grew(self, row: RequestRow, before: float, now: float) -> None:
        """A row emitted tokens; `before` is when it last did, 0 if this is the first time."""
        histogram, since = (self.inter_token_latency, before) if before else (self.time_to_first_token, row.arrived_at)
        histogram.observe(now - since)

    def finished(self, row: RequestRow, now: float, reason: str) -> None:
        """Count a row that has ended, for `reason`."""
        self._finished[reason].inc()
        self.end_to_end.observe(now - row.arrived_at)
        if row.sequence.num_output_tokens > 1 and row.first_at:
            self.time_per_output_token.observe((row.last_at - row.first_at) / (row.sequence.num_output_tokens - 1))

    def cut(self) -> None:
        """Count a stream whose client did not read."""
        self.unread_cut["stream"].inc()

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)
