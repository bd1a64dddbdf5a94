"""The engine's counters under vLLM's names: what `LLM.get_metrics` returns, and the server's `GET /metrics` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from echelon.stats import DrafterFault

PREFIX = "vllm:"  # of names in Python, so that scripts made for vLLM find them


@dataclass(frozen=True)
class Metric:
    """A figure of the engine, with vLLM's name, and labels where there are several of the name."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """What only grows."""

    value: float = 0


@dataclass(frozen=True)
class Gauge(Metric):
    """What goes up and down."""

    value: float = 0.0


@dataclass(frozen=True)
class Vector(Metric):
    """What only grows, by position in the draft."""

    values: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """Figures of one name without prefix, one for each value of `label`; without a label there is one, and its key says nothing."""

    kind: type[Metric]
    name: str
    description: str
    values: Mapping[str, float]
    label: str | None = None

    def metrics(self) -> list[Metric]:
        """The figures one by one, those of positions together."""
        if self.kind is Vector:
            return [Vector(PREFIX + self.name, values=[int(value) for value in self.values.values()])]
        kind: Any = self.kind
        return [kind(PREFIX + self.name, {self.label: key} if self.label else {}, value) for key, value in self.values.items()]


COUNTERS = (  # kind, name, description, name in `LLM.get_counters`
    (Gauge, "num_requests_running", "Sequences in the batch.", "num_running"),
    (Gauge, "num_requests_waiting", "Sequences that wait for a place.", "num_waiting"),
    (Gauge, "kv_cache_usage_perc", "Share of KV blocks in use.", "kv_usage"),
    (Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prefix_queries"),
    (Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_prefix_hits"),
    (Counter, "num_preemptions", "Sequences put back for lack of blocks.", "num_preemptions"),
    (Counter, "generation_tokens", "Tokens emitted.", "num_emitted_tokens"),
    (Counter, "spec_decode_num_drafts", "Drafts verified.", "num_drafts"),
    (Counter, "spec_decode_num_draft_tokens", "Tokens drafted.", "num_draft_tokens"),
    (Counter, "spec_decode_num_accepted_tokens", "Drafted tokens accepted.", "num_accepted_tokens"),
)
ADAPTIVE = (  # the same, of names in `get_counters()["adaptive"]`; only where draft lengths are "auto"
    (Counter, "spec_decode_num_proposed_tokens", "Tokens drafted, verified or not.", "num_proposed_tokens"),
    (Counter, "spec_decode_predicted_ms", "Milliseconds of steps as predicted.", "predicted_ms"),
    (Counter, "spec_decode_measured_ms", "Milliseconds of the predicted steps as measured.", "measured_ms"),
    (Gauge, "spec_decode_prediction_error", "Median of |predicted / measured - 1|, latest steps.", "prediction_error"),
    (Gauge, "spec_decode_regret", "Share by which the best single length would have been faster.", "regret"),
)


def families(counters: Mapping[str, Any]) -> Iterator[Family]:
    """What the counters of `LLM.get_counters` say, by name."""
    values = {
        **counters,
        "kv_usage": 1.0 - counters["num_free_kv_blocks"] / counters["num_kv_blocks"],
        "num_drafts": sum(counters["num_drafts_by_position"][:1]),
    }
    adaptive = counters["adaptive"] or {}
    for kind, name, description, key in COUNTERS:
        yield Family(kind, name, description, {"": values[key]})
    for kind, name, description, key in ADAPTIVE:
        if key in adaptive:
            yield Family(kind, name, description, {"": adaptive[key]})
    accepted = {str(position): count for position, count in enumerate(counters["num_accepted_by_position"])}
    lengths = {str(length): count for length, count in counters["num_steps_by_draft_length"].items()}
    rule, faults = {counters["acceptance"]: 1.0}, dict.fromkeys(DrafterFault, 0) | counters["drafter_faults"]
    yield Family(Vector, "spec_decode_num_accepted_tokens_per_pos", "Accepted by position.", accepted, "position")
    yield Family(Counter, "spec_decode_num_steps_per_length", "Rows' steps by tokens verified.", lengths, "length")
    yield Family(Gauge, "spec_decode_info", "The rule by which drafted tokens are kept.", rule, "acceptance")
    yield Family(Counter, "spec_decode_drafter_fallbacks", "Failures of the drafter, and steps without it, by reason.", faults, "reason")
