"""Claims of papers, what was measured of them, and the rules that say whether they hold here. Nothing in a verdict is typed by hand."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cells import Record, Records
from echelon.bench.throughput import ThroughputResult

HOLDS, FAILS, NOT_MEASURED, NOT_HERE = "holds", "fails", "not measured yet", "cannot be tried here"
LEAST_SAMPLES = 3  # of a figure whose spread says something
OPTIONS = {  # of commands, by what records call them among their settings
    **{name: f"--{name}" for name in ("rows", "rounds", "tokens", "count", "parameters", "steps", "continuations")},
    "fine_tuning": "--fine-tuning-steps",
    "batch_size": "--batch-size",
}


class Evidence:
    """Records below a folder, by the names of their files without the ending: `benchmarks/table-opt-08`. `used`: what was asked for and is
    there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.used = folder, dict[str, Record]()

    def record(self, name: str) -> Record | None:
        """One record; None where nothing was measured, or that failed."""
        return self._noted(name, self._read(name))

    def _read(self, name: str) -> Record | None:
        path = self.folder / f"{name}.json"
        return Records(path).read() if path.exists() else None

    def _noted(self, name: str, record: Record | None) -> Record | None:
        if record is None or "failed" in record:
            return None
        self.used[name] = record
        return record

    def results(self, name: str) -> list[ThroughputResult]:
        """Of a record of speeds; none where it is missing."""
        record = self.record(name) or {}
        return [ThroughputResult(**{k: v for k, v in r.items() if k != "median"}) for r in record.get("results", [])]

    def speeds(self, name: str) -> dict[tuple[str, str], list[float]]:
        """(method, strategy) → decoding speed by round."""
        return {(r.method, r.strategy): r.decode_tokens_per_second for r in self.results(name)}

    def device(self, cell: str) -> Record:
        """The record of a cell of `scripts/gpu_check.sh`; nothing where no device was there, or it failed."""
        return self._noted(f"gpu_check/{cell}", (self._read("gpu_check") or {}).get(cell)) or {}

    def device_results(self, cell: str) -> list[ThroughputResult]:
        """Speeds in that record."""
        return [ThroughputResult(**r) for r in self.device(cell).get("results", [])]


@dataclass(frozen=True)
class Measured:
    """What was measured: `samples`, one a round, seed or row; or, for rules of order and of all, medians by `labels`, each of `rounds`
    samples at least where that is known. `form` prints one of them.
    """

    samples: SequenceOf[float]
    form: str = "{:.2f}"
    labels: SequenceOf[str] = ()
    note: str = ""
    rounds: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def __str__(self) -> str:
        printed = [self.form.format(s) for s in self.samples]
        if self.labels:
            text = ", ".join(f"{label}: {value}" for label, value in zip(self.labels, printed, strict=True))
            if self.rounds is not None and self.rounds < LEAST_SAMPLES:
                text += f" ({'one sample' if self.rounds == 1 else f'only {self.rounds} samples'} of some)"
        elif len(printed) == 1:
            text = f"{printed[0]} (one sample)"
        else:
            least, most = self.form.format(min(self.samples)), self.form.format(max(self.samples))
            count = f"{len(printed)} samples" if len(printed) >= LEAST_SAMPLES else f"only {len(printed)} samples"
            text = f"{self.form.format(self.median)} ({least} to {most}, {count})"
        return f"{text}; {self.note}" if self.note else text


class VerdictRule(Protocol):
    """When a claim holds; `text` stands in the page."""

    @property
    def text(self) -> str:
        """The rule in words."""

    def holds(self, measured: Measured) -> bool:
        """Whether what was measured bears the claim out."""


@dataclass(frozen=True)
class AtLeast:
    """The median reaches a bound; of labelled values every one does."""

    bound: float
    form: str = "{:.2f}"

    @property
    def text(self) -> str:
        return f"≥ {self.form.format(self.bound)}"

    def holds(self, measured: Measured) -> bool:
        return (min(measured.samples) if measured.labels else measured.median) >= self.bound


@dataclass(frozen=True)
class AtMost:
    """The median does not exceed a bound; of labelled values none does."""

    bound: float
    form: str = "{:.2f}"

    @property
    def text(self) -> str:
        return f"≤ {self.form.format(self.bound)}"

    def holds(self, measured: Measured) -> bool:
        return (max(measured.samples) if measured.labels else measured.median) <= self.bound


@dataclass(frozen=True)
class Within:
    """The median lies within bounds; of labelled values all do."""

    low: float
    high: float
    form: str = "{:.2f}"

    @property
    def text(self) -> str:
        return f"{self.form.format(self.low)} to {self.form.format(self.high)}"

    def holds(self, measured: Measured) -> bool:
        return all(self.low <= value <= self.high for value in (measured.samples if measured.labels else [measured.median]))


@dataclass(frozen=True)
class Ordered:
    """Labelled values rise, or fall, from each to the next."""

    rises: bool = True

    @property
    def text(self) -> str:
        return "each above the one before" if self.rises else "each below the one before"

    def holds(self, measured: Measured) -> bool:
        return all((b > a) if self.rises else (b < a) for a, b in pairwise(measured.samples))


@dataclass(frozen=True)
class Crosses:
    """Labelled values lie at or above a bound first, and below it at last: there is a crossover. `falls`: each is below the one before."""

    bound: float = 1.0
    falls: bool = False

    @property
    def text(self) -> str:
        order = f"{Ordered(rises=False).text}, " if self.falls else ""
        return f"{order}the first ≥ {self.bound:g}, the last below"

    def holds(self, measured: Measured) -> bool:
        is_in_order = not self.falls or Ordered(rises=False).holds(measured)
        return is_in_order and measured.samples[0] >= self.bound > measured.samples[-1]


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper with the command that tries it.

    published  the paper's own figure, and its setting
    ours       what was measured of it; None where nothing was
    needs      what trying it takes that a CPU at hand does not have; with it, and without measurements, it "cannot be tried here"
    is_merit   whether falling short is to our disadvantage; what a paper says of others' costs is none
    why        why ours falls short, by ablation or by counting
    """

    name: str
    sentence: str
    published: str
    command: str
    rule: VerdictRule
    ours: Callable[[Evidence], Measured | None]
    needs: str = ""
    is_merit: bool = True
    why: Callable[[Evidence], str] | None = None


@dataclass(frozen=True)
class Judged:
    """A claim with what was measured of it, and the verdict that follows."""

    claim: Claim
    measured: Measured | None
    verdict: str
    records: Mapping[str, Record] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, list[Any]]:
        """What the records were measured with, of that which the command has options for; several values where they differ."""
        known = [r["settings"] for r in self.records.values() if isinstance(r.get("settings"), dict)]
        found = {name: list(dict.fromkeys(s[name] for s in known if name in s)) for name in OPTIONS}
        return {name: values for name, values in found.items() if values}

    @property
    def command(self) -> str:
        """The claim's command, with the settings of the records."""
        options = [f"{OPTIONS[name]} {values[0]}" for name, values in self.settings.items() if len(values) == 1]
        return " ".join([self.claim.command, *options])

    @property
    def differing(self) -> str:
        """Settings in which records differ, in words."""
        found = [f"{OPTIONS[name]} {' and '.join(map(str, values))}" for name, values in self.settings.items() if len(values) > 1]
        return f" (records of {', '.join(found)})" if found else ""

    @property
    def is_worse(self) -> bool:
        """Ours falls short of what was published."""
        return self.verdict == FAILS and self.claim.is_merit


def verdict_of(claim: Claim, measured: Measured | None) -> str:
    """The rule of the page: what was measured decides by the claim's own rule; where nothing was, whether it could have been."""
    if measured is not None and measured.samples:
        return HOLDS if claim.rule.holds(measured) else FAILS
    return f"{NOT_HERE}: it takes {claim.needs}" if claim.needs else NOT_MEASURED


def judge(claim: Claim, evidence: Evidence) -> Judged:
    """Measure a claim by the evidence that there is."""
    evidence.used = {}
    measured = claim.ours(evidence)
    records = dict(evidence.used)
    count = kinds_of_machines([e for record in records.values() for e in environments(record)])
    if measured is not None and count > 1:
        note = f"of {count} kinds of machines or numbers of threads"
        measured = replace(measured, note="; ".join(part for part in (measured.note, note) if part))
    return Judged(claim, measured, verdict_of(claim, measured), records)


def kinds_of_machines(environments: SequenceOf[Mapping[str, str]]) -> int:
    """Processors, instructions and numbers of threads that differ; older records say neither a processor's family nor its instructions."""
    machines = {(re.sub(r" family \d+ model \d+", "", e["cpu"]), e["threads"]) for e in environments}
    return max(len(machines), len({e["isa"] for e in environments if "isa" in e}))


def environments(record: Any) -> Iterator[dict[str, str]]:
    """Where a record, or what it holds, was measured."""
    if isinstance(record, dict) and "environment" in record:
        yield record["environment"]
    elif isinstance(record, dict | list):
        for part in record.values() if isinstance(record, dict) else record:
            yield from environments(part)


def over(speeds: Mapping[Any, SequenceOf[float]], one: Any, other: Any) -> list[float]:
    """Speeds of one over those of another, round by round; nothing where either is missing."""
    pairs = zip(speeds.get(one, ()), speeds.get(other, ()), strict=False)
    return [a / b for a, b in pairs if b]


def sampled(values: SequenceOf[float], form: str = "{:.2f}", note: str = "") -> Measured | None:
    """Samples, where there are any."""
    return Measured(values, form, note=note) if values else None


def labelled(values: Mapping[str, float | None], form: str = "{:.2f}", least: int = 2, note: str = "") -> Measured | None:
    """Values by their labels, where at least so many are known."""
    known = {label: value for label, value in values.items() if value is not None}
    return Measured(list(known.values()), form, list(known), note) if len(known) >= least else None


def medians(samples: Mapping[str, SequenceOf[float]], form: str = "{:.2f}") -> Measured | None:
    """Medians of samples by their labels, where at least two have some."""
    known = {label: own for label, own in samples.items() if own}
    values = [statistics.median(own) for own in known.values()]
    return Measured(values, form, list(known), rounds=min(map(len, known.values()))) if len(known) > 1 else None


def middle(values: SequenceOf[float]) -> float | None:
    """Their median, where there are any."""
    return statistics.median(values) if values else None
