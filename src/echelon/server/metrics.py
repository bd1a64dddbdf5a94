"""Prometheus metrics with vLLM's names, so that dashboards and benchmark clients made for it read them; the prefix can be switched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from echelon.llm import LLM

if TYPE_CHECKING:
    from echelon.server.request_state import Row

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 600.0)
UNREAD_LIMITS = ("time", "buffers", "stream")  # a connection's write timeout, the memory of all buffers, that of one stream
REASONS = ("stop", "length", "error", "abort")


class EngineCollector:
    """Counters that the engine keeps anyway, read when they are asked for. Reads no structure that the engine's thread may be changing."""

    def __init__(self, llm: LLM, prefix: str, model: str) -> None:
        self._llm, self._prefix, self._model = llm, prefix, model

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def collect(self) -> Iterator[Metric]:
        stats, scheduler = self._llm.stats, self._llm.engine.scheduler
        pool = self._llm.engine.target.cache.tables.pool
        histogram = dict(stats.acceptance)  # a copy in one step, which no other thread can interrupt
        num_drafts = sum(count for (drafted, _), count in histogram.items() if drafted)
        yield self._gauge("num_requests_running", "Sequences in the batch.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Sequences that wait for a place.", len(scheduler.waiting))
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use.", 1.0 - pool.num_free / pool.num_blocks)
        yield self._counter("num_preemptions", "Sequences put back for lack of blocks.", stats.num_preemptions)
        yield self._counter("generation_tokens", "Tokens emitted.", stats.num_emitted_tokens)
        yield self._counter("spec_decode_num_drafts", "Drafts verified.", num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.num_accepted_tokens)
        positions = CounterMetricFamily(
            self._prefix + "spec_decode_num_accepted_tokens_per_pos", "Accepted by position.", labels=["model_name", "position"]
        )
        for place in range(max((drafted for drafted, _ in histogram), default=0)):
            accepted = sum(count for (_, kept), count in histogram.items() if kept > place)
            positions.add_metric([self._model, str(place)], accepted)
        yield positions
        rule = GaugeMetricFamily(
            self._prefix + "spec_decode_info", "The rule by which drafted tokens are kept.", labels=["model_name", "acceptance"]
        )
        rule.add_metric([self._model, self._llm.acceptance_name], 1)
        yield rule
        fallbacks = CounterMetricFamily(
            self._prefix + "spec_decode_drafter_fallbacks", "Steps without the drafter, by reason.", labels=["model_name", "reason"]
        )
        for reason, count in dict(stats.drafter_faults).items():
            fallbacks.add_metric([self._model, reason], count)
        yield fallbacks


class Metrics:
    """What a server shows at /metrics. Labels come from fixed sets, so that no client can add a series."""

    def __init__(self, llm: LLM, prefix: str, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, prefix, model))

        def histogram(name: str, text: str) -> Histogram:
            family = Histogram(prefix + name, text, ["model_name"], registry=self._registry, buckets=SECONDS)
            return family.labels(model)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between a row's steps.")
        self.time_per_output_token = histogram("request_time_per_output_token_seconds", "Decoding time a token, by request.")
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self.prompt_tokens = Counter(prefix + "prompt_tokens", "Prompt tokens.", ["model_name"], registry=self._registry).labels(model)
        finished = Counter(prefix + "request_success", "Finished sequences.", ["model_name", "finished_reason"], registry=self._registry)
        self._finished = {reason: finished.labels(model, reason) for reason in REASONS}
        unread = Counter(prefix + "unread_cut", "Clients cut because they did not read.", ["model_name", "limit"], registry=self._registry)
        self.unread_cut = {limit: unread.labels(model, limit) for limit in UNREAD_LIMITS}

    def started(self, row: Row) -> None:
        self.queue_time.observe(row.started_at - row.arrived_at)
        self.prompt_tokens.inc(row.sequence.num_prompt_tokens)

    def grew(self, row: Row, before: float, now: float) -> None:
        """A row emitted tokens; `before` is when it last did, 0 if this is the first time."""
        if before:
            self.inter_token_latency.observe(now - before)
        else:
            self.time_to_first_token.observe(now - row.arrived_at)

    def finished(self, row: Row, now: float, reason: str) -> None:
        self._finished[reason].inc()
        self.end_to_end.observe(now - row.arrived_at)
        if row.sequence.num_output_tokens > 1 and row.first_at:
            self.time_per_output_token.observe((row.last_at - row.first_at) / (row.sequence.num_output_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)
