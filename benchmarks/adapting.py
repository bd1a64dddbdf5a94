"""What adapting costs, and how it follows load and machine: `python -m benchmarks.adapting [--output FOLDER] [PREFIX ...]`, resumable.

The embedded pair grown to 1.1 billion parameters, in bfloat16; greedy.

idle      steps of an engine that could draft and does not, each beside one of its twin without the drafter
deciding  milliseconds of a step in which is decided, estimated and learned, beside a plain step
wrong     512 steps with a draft model whose tokens are never right, each beside a plain one
starting  the first tokens of a new engine that decides, each step beside one of an engine that cannot draft: while little is known, later,
          and when some rows have ended before others
moving    1, 32, 4 and 1 rows in one run, beside fixed lengths, step by step in turn
arriving  requests that arrive at random, at most 8 at a time: seconds from arrival to the last token, over those without a drafter
slowed    predicted beside measured milliseconds, before and after busy processes take their share of the machine
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.cells import Cell, Record, asked_of, run_asked, said
from benchmarks.workloads import Models, Size, source, trained_heads
from echelon import LLM, SamplingParams
from echelon.adaptive.controller import SETTLED, BatchController, Controller
from echelon.adaptive.cost_files import CostRecord, write_costs
from echelon.adaptive.cost_table import CostCurve, CostTable
from echelon.bench.latency import measure_latency, sequence_of
from echelon.bench.report import table
from echelon.bench.throughput import DecodingMethod
from echelon.draft import Draft, Verdict
from echelon.drafters.acceptance_watch import AcceptanceWatch
from echelon.drafters.base import Drafter, NoDrafter
from echelon.engine import Engine
from echelon.sequence import PlannedRow, Sequence
from echelon.stats import StepRecord

PROMPT_TOKENS, NEW_TOKENS = 32, 64
DRAFT_MODEL = {"method": "draft_model"}
DEAR = CostTable(  # no drafted token ever pays
    step=CostCurve(tokens=(1, 2), milliseconds=(1.0, 1000.0)), drafting=CostCurve(tokens=(1,), milliseconds=(1.0,))
)
FIXED = (1, 2, 4, 6)
ENOUGH = 4  # rows whose tokens take long enough to be compared


@dataclass(frozen=True)
class Lengths:
    """How long measurements are; tests take small ones."""

    steps: int = 48
    pairs: int = 6  # of engines beside each other
    settling: int = 200
    tokens: int = 512
    rounds: int = 3
    arrivals: int = 32
    loads: tuple[float, ...] = (0.3, 0.7, 1.0)
    phases: tuple[int, ...] = (1, 32, 4, 1)  # rows
    phase_tokens: int = 96  # of a row, in a phase; of fewer rows than ENOUGH as many as of these


class NeverRight(Drafter):
    """What `drafter` proposes, with its own confidence, but a token in each place that no text has."""

    def __init__(self, drafter: Drafter, token: int) -> None:
        self._drafter, self._token, self.hidden_state_names = drafter, token, drafter.hidden_state_names

    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        draft = self._drafter.propose(rows)
        return replace(draft, tokens=np.full_like(draft.tokens, self._token))

    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:
        self._drafter.observe(rows, verdict, hidden_states)

    def forget(self, row: int) -> None:
        self._drafter.forget(row)


class Rows:
    """Requests of one engine, all of whose prompts are read before anything is measured; `drafted`: None, or the most that is drafted."""

    def __init__(self, llm: LLM, engine: Engine, max_tokens: int, count: int, drafted: int | None = None) -> None:
        self._engine, self.running = engine, list[Sequence]()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, num_speculative_tokens=drafted)
        prompts = source(llm.target, count, PROMPT_TOKENS, is_ragged=False)
        self._waiting = iter([sequence_of(llm, row, prompt, params) for row, prompt in enumerate(prompts)])

    @property
    def num_emitted(self) -> int:
        """Tokens of all rows that run."""
        return sum(s.num_output_tokens for s in self.running)

    def become(self, count: int) -> None:
        """Let so many rows run."""
        while len(self.running) > count:
            self._engine.abort(self.running.pop())
        for sequence in (next(self._waiting) for _ in range(count - len(self.running))):
            self._engine.add(sequence)
            self.running.append(sequence)
        while not all(s.num_output_tokens for s in self.running):
            self._engine.step()


@contextmanager
def rows_of(llm: LLM, max_tokens: int, count: int, drafted: int | None = None) -> Iterator[tuple[Engine, Rows]]:
    """The engine of `llm` and its rows, of which none is left behind."""
    with llm.exclusive() as engine:
        rows = Rows(llm, engine, max_tokens, count, drafted)
        try:
            yield engine, rows
        finally:
            rows.become(0)


def clocked(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def by_turns(own: Callable[[], object], plain: Callable[[], object], steps: int) -> tuple[list[float], list[float]]:
    """Seconds of calls of both, so many each."""
    seconds: tuple[list[float], list[float]] = [], []
    for i in range(steps):
        for kind in (i % 2, 1 - i % 2):
            seconds[kind].append(clocked((own, plain)[kind]))
    return seconds


def beside_plain(engine: Engine, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of steps as they are and of plain ones of the same engine, by turns."""
    own, plain = (engine.controller, engine.drafter), (None, NoDrafter())

    def step_with(controller: Controller | None, drafter: Drafter) -> None:
        engine.controller, engine.drafter = controller, drafter
        engine.step()

    found = by_turns(partial(step_with, *own), partial(step_with, *plain), steps)
    engine.controller, engine.drafter = own
    return found


def idle(models: Models, method: str, batch: int, lengths: Lengths) -> Record:
    """An engine in which nothing ever pays, probes included, beside its twin, whose drafter is taken out; then the other way round, since
    twins differ by 1 % or 2, as their buffers lie in memory.
    """
    target, config = models.grown, DRAFT_MODEL
    if method != "draft_model":
        target, folders = models.with_heads
        config = {"method": method, "model": folders[method], "tree": "dynamic"}
    draft = models.draft if method == "draft_model" else None
    settings: dict[str, Any] = {"max_num_seqs": batch, "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as folder:
        path = write_costs(Path(folder) / "dear.json", CostRecord(key={}, table=DEAR))
        found = []
        for _ in range(lengths.pairs):
            a, b = (LLM(target, config | {"cost_table": str(path)}, draft, **settings) for _ in range(2))
            found.append((_idle_beside(a, b, batch, lengths.steps), _idle_beside(b, a, batch, lengths.steps)))
            del a, b  # before there are others
    medians = [math.sqrt(ratio * turned) for ratio, turned in found]
    return {"medians": medians, "median": statistics.median(medians), "halves": found}


def _idle_beside(llm: LLM, twin: LLM, batch: int, steps: int) -> float:
    """The middle of a step's time over that of one of `twin` without its drafter."""
    with rows_of(llm, steps + 16, batch) as (engine, rows), rows_of(twin, steps + 16, batch, 0) as (other, others):
        drafting = other.controller, other.drafter, other.target.hidden_state_reader, other.observers
        other.controller, other.drafter, other.target.hidden_state_reader = None, NoDrafter(), None
        other.observers = [o for o in other.observers if not isinstance(getattr(o, "__self__", None), AcceptanceWatch)]
        rows.become(batch)
        others.become(batch)
        own, plain = by_turns(engine.step, other.step, steps)
        others.become(0)
        other.controller, other.drafter, other.target.hidden_state_reader, other.observers = drafting
    return statistics.median(a / b for a, b in zip(own, plain, strict=True))


def deciding(models: Models, batch: int, lengths: Lengths) -> Record:
    """What the controller takes, call by call."""
    llm = LLM(models.grown, DRAFT_MODEL, models.draft, max_num_seqs=batch, enable_prefix_caching=False)
    controller: Any = llm.engine.controller
    taken = dict.fromkeys(("planned", "goes_on", "chosen", "observe"), 0.0)

    def timed(name: str, call: Callable[..., Any], *given: Any) -> Any:
        start = time.perf_counter()
        found = call(*given)
        taken[name] += time.perf_counter() - start
        return found

    for name in taken:
        setattr(controller, name, partial(timed, name, getattr(controller, name)))
    drafter: Any = llm.engine.drafter.unguarded
    drafter.pace = controller.goes_on
    with rows_of(llm, 10 * lengths.steps, batch) as (engine, rows):
        rows.become(batch)
        taken.update(dict.fromkeys(taken, 0.0))
        own, plain = beside_plain(engine, lengths.steps)
    parts = {name: seconds / len(own) * 1e3 for name, seconds in taken.items()}
    return {"parts": parts, "plain": statistics.median(plain) * 1e3, "share": sum(parts.values()) / (statistics.median(plain) * 1e3)}


def wrong(models: Models, batch: int, lengths: Lengths) -> Record:
    """So many steps with drafts that are never right, each beside a plain one of the same engine."""
    llm = LLM(models.grown, DRAFT_MODEL, models.draft, max_num_seqs=batch, enable_prefix_caching=False)
    records: list[StepRecord] = []
    with rows_of(llm, 2 * lengths.tokens + 16, batch) as (engine, rows):
        engine.drafter = NeverRight(engine.drafter, llm.target.vocab_size - 1)
        with engine.observed(records.append):
            rows.become(batch)
            own, plain = beside_plain(engine, lengths.tokens)
    drafted = [sum(kept.num_draft_tokens for kept in r.verdict) for r in records]
    return {
        "cost": sum(own) / sum(plain) - 1.0,
        "drafted": sum(drafted),
        "accepted": sum(len(kept.path) for r in records for kept in r.verdict),
        "steps_with_drafts": sum(n > 0 for n in drafted),
        "steps": len(own),
    }


def starting(models: Models, method: str, batch: int, lengths: Lengths) -> Record:
    """Steps of new engines, a list a round: rows that run, tokens that they emitted, seconds of the step and of a plain one of all rows."""
    target, folders = models.with_heads
    config: dict[str, Any] = {"method": method} | ({"model": folders[method]} if method in folders else {})
    settings: dict[str, Any] = {"max_num_seqs": batch, "enable_prefix_caching": False}
    rounds: list[list[tuple[int, int, float, float]]] = []
    for _ in range(lengths.rounds):
        llm, plain = LLM(target, config, models.draft if method == "draft_model" else None, **settings), LLM(target, **settings)
        steps: list[tuple[int, int, float, float]] = []
        with rows_of(llm, NEW_TOKENS, batch) as (engine, rows), rows_of(plain, 2 * NEW_TOKENS, batch) as (other, others):
            rows.become(batch)
            others.become(batch)
            while engine.has_work:
                num_running, before = sum(not s.is_finished for s in rows.running), rows.num_emitted
                seconds = clocked(engine.step), clocked(other.step)
                steps.append((num_running, rows.num_emitted - before, *seconds))
        rounds.append(steps)
    return {"batch": batch, "rounds": rounds}


def moving(models: Models, lengths: Lengths) -> Record:
    """Tokens a second by setting and phase, one a round, and milliseconds of plain steps.

    Engines of all settings step in turn, until each has emitted as many tokens: the same texts in the same minutes.
    """
    settings = {"plain": None, "auto": DRAFT_MODEL} | {str(n): DRAFT_MODEL | {"num_speculative_tokens": n} for n in FIXED}
    most, count = max(lengths.phases), sum(lengths.phases) * lengths.rounds
    speeds: dict[str, list[list[float]]] = {name: [[] for _ in lengths.phases] for name in settings}
    spread: list[list[float]] = [[] for _ in lengths.phases]
    with ExitStack() as stack:
        own: dict[str, tuple[Engine, Rows]] = {}
        for name, config in settings.items():
            llm = LLM(models.grown, config, models.draft, max_num_seqs=most, enable_prefix_caching=False)
            own[name] = stack.enter_context(rows_of(llm, 4 * ENOUGH * lengths.phase_tokens, count))
        for _, (phase, size) in product(range(lengths.rounds), enumerate(lengths.phases)):
            for _, rows in own.values():
                if phase == 0:
                    rows.become(0)  # other texts
                rows.become(size)
            seconds, emitted = phase_of(own, max(size, ENOUGH) * lengths.phase_tokens)
            for name in settings:
                speeds[name][phase].append(emitted[name] / sum(seconds[name]))
            spread[phase] += [s * 1e3 for s in seconds["plain"]]
            said(f"{size} rows: " + ", ".join(f"{name} {rounds[phase][-1]:.0f}" for name, rounds in speeds.items()))
    return {"phases": list(lengths.phases), "speeds": speeds, "plain_ms": spread}


def phase_of(own: dict[str, tuple[Engine, Rows]], tokens: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every engine's steps, and tokens that they emitted: so many at least, unless all rows end before. Engines step in turn,
    another one first each time.
    """
    before = {name: rows.num_emitted for name, (_, rows) in own.items()}
    seconds: dict[str, list[float]] = {name: [] for name in own}
    emitted = dict.fromkeys(own, 0)
    names = deque(own)
    while names:
        for name in names:
            engine, rows = own[name]
            seconds[name].append(clocked(engine.step))
            emitted[name] = rows.num_emitted - before[name]
        names = deque(name for name in names if emitted[name] < tokens and own[name][0].has_work)
        names.rotate()
    return seconds, emitted


def slowed(models: Models, batch: int, lengths: Lengths) -> Record:
    """Medians of |predicted ÷ measured − 1|: alone, right after the others have come, later; and of plain steps about their median."""
    llm, plain = (
        LLM(models.grown, config, models.draft, max_num_seqs=batch, enable_prefix_caching=False) for config in (DRAFT_MODEL, None)
    )
    controller = llm.engine.controller
    assert isinstance(controller, BatchController)
    found: dict[str, Any] = {}

    def errors(steps: int) -> float:
        """Of so many steps that were compared with what had been said of them; of fewer where the rows end before."""
        with rows_of(llm, 12 * steps, batch) as (engine, rows):
            rows.become(batch)
            first = controller.hindsight.num_steps
            while engine.has_work and controller.hindsight.num_steps < first + steps:
                engine.step()
        return float(np.median(list(controller.hindsight.errors)[first - controller.hindsight.num_steps :]))

    def about_median() -> float:
        with rows_of(plain, lengths.steps + 8, batch) as (engine, rows):
            rows.become(batch)
            seconds = np.array([clocked(engine.step) for _ in range(lengths.steps)])
        return float(np.median(np.abs(seconds / np.median(seconds) - 1.0)))

    found |= {"plain": about_median(), "alone": errors(lengths.steps)}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        found["at_first"] = errors(lengths.steps)
        for _ in range(max(0, lengths.settling // lengths.steps - 1)):
            errors(lengths.steps)
        found |= {"later": errors(lengths.steps), "plain_slowed": about_median()}
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return found


def arriving(models: Models, lengths: Lengths) -> Record:
    """P50 and P99 in seconds, a round each, by load and by method. Loads are shares of what plain decoding could serve."""
    prompts = source(models.grown, lengths.arrivals, PROMPT_TOKENS, is_ragged=False)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    methods = [DecodingMethod("plain", None), DecodingMethod("auto", DRAFT_MODEL)]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for seed in range(lengths.rounds + 1):
        for r in measure_latency(models.grown, models.draft, methods, prompts, params, 8, lengths.loads, seed):
            found.setdefault(f"{r.load:g}", {}).setdefault(r.method, []).append((r.p50, r.p99))
    return {"latencies": found}


def as_markdown(records: dict[str, Record]) -> str:
    """A line for each goal."""
    lines = []
    for name, r in records.items():
        if name.startswith("idle"):
            medians = r.get("medians", [r["median"]])  # of earlier days one pair
            told = f"{r['median']:.3f} ({min(medians):.3f} to {max(medians):.3f})"
            lines.append((name, "drafting nothing, over an engine without its drafter", told, "≤ 1.01"))
        elif name.startswith("deciding"):
            lines.append((name, "share of a plain step", f"{r['share']:.2%} of {r['plain']:.0f} ms", "≤ 0.5 %"))
        elif name.startswith("wrong"):
            lines.append(
                (name, "never right, over plain steps", f"{r['cost']:+.1%} ({r['drafted']} drafted, {r['accepted']} kept)", "≤ 3 %")
            )
        elif name.startswith("starting"):
            lines.append((name, "tokens a second of a new engine, over plain steps", _parts(r), "≥ 0.97"))
        elif name == "arriving":
            lines += [(name, f"auto over plain at {float(load):.0%} load", _latency(own), "≤ 1.05") for load, own in r["latencies"].items()]
        elif name == "moving":
            lines += [(name, f"phase {i + 1}, {size} rows", *_phase(r, i)) for i, size in enumerate(r["phases"])]
        else:
            kinds = ", ".join(f"{kind} {r[kind]:.1%}" for kind in ("alone", "at_first", "later", "plain", "plain_slowed"))
            lines.append((name, "predicted beside measured", kinds, "≤ 5 % or 1.5 × plain"))
    told = table(["cell", "", "measured", "goal"], lines)
    if not any(name.startswith("starting") for name in records):
        return told
    return f"{told}\n\nOf a new engine, *some rows* are steps in which others have ended, beside plain steps of all rows: fewer emit less."


def _latency(seconds: dict[str, list[tuple[float, float]]]) -> str:
    ratios = [[a / p for a, p in zip(auto, plain, strict=True)] for auto, plain in zip(seconds["auto"], seconds["plain"], strict=True)]
    parts = [(name, [r[i] for r in ratios]) for i, name in enumerate(("P50", "P99"))]
    return ", ".join(f"{name} {statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f})" for name, own in parts)


def _parts(record: Record) -> str:
    """Of whole rounds, and of their parts."""

    def over_plain(is_in: Callable[[int, int], bool]) -> str:
        rounds = [[step for i, step in enumerate(steps) if is_in(i, step[0])] for steps in record["rounds"]]
        found = [_over_plain(steps, record["batch"]) for steps in rounds if steps]
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "none"

    batch = record["batch"]
    parts = {
        "all": over_plain(lambda *_: True),
        f"first {SETTLED} steps": over_plain(lambda i, _: i < SETTLED),
        "later, all rows": over_plain(lambda i, rows: i >= SETTLED and rows == batch),
        "some rows": over_plain(lambda _, rows: rows < batch),
    }
    return ", ".join(f"{name} {ratio}" for name, ratio in parts.items())


def _over_plain(steps: SequenceOf[tuple[int, int, float, float]], batch: int) -> float:
    _, emitted, seconds, plain = (sum(column) for column in zip(*steps, strict=True))
    return float(emitted * plain / (seconds * batch * len(steps)))


def _phase(record: Record, phase: int) -> tuple[str, str]:
    """Beside the setting that is best over all rounds, by the middle round; and the least that it may be."""
    speeds = {name: rounds[phase] for name, rounds in record["speeds"].items()}

    def over(name: str) -> list[float]:
        return [a / b for a, b in zip(speeds["auto"], speeds[name], strict=True)]

    best = min((name for name in speeds if name != "auto"), key=lambda name: statistics.median(over(name)))
    found = over(best)
    plain = np.array(record["plain_ms"][phase])
    least = min(0.95, 1.0 - 1.5 * float(np.median(np.abs(plain / np.median(plain) - 1.0))))
    spread = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
    return f"{spread} of the best ({best}), {statistics.median(over('plain')):.2f} of plain", f"≥ {least:.2f}"


def cells(models: Models, lengths: Lengths) -> list[Cell]:
    """All that is measured."""
    found = [
        Cell(f"idle_{m}_b{b}", partial(idle, models, m, b, lengths), inputs=trained_heads({m} & {"eagle"}))
        for m in ("draft_model", "eagle")
        for b in (1, 8, 32)
    ]
    found += [Cell("deciding_b32", partial(deciding, models, 32, lengths))]
    found += [Cell(f"wrong_b{b}", partial(wrong, models, b, lengths)) for b in (1, 8)]
    found += [
        Cell(f"starting_{m}_b{b}", partial(starting, models, m, b, lengths), inputs=trained_heads({m} & {"eagle"}))
        for m in ("draft_model", "ngram", "eagle")
        for b in (1, 8)
    ]
    found += [Cell("arriving", partial(arriving, models, lengths))]
    found += [Cell("moving", partial(moving, models, lengths)), Cell("slowed_b8", partial(slowed, models, 8, lengths))]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of this commit; 1 if one fails."""
    asked = asked_of(__doc__, "adapting", arguments=arguments)
    return run_asked(asked, cells(Models(Size(), ["eagle"]), Lengths()), as_markdown)[1]


if __name__ == "__main__":
    sys.exit(main())
