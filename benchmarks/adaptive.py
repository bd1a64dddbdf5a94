"""Adaptive lengths beside every fixed one: `python -m benchmarks.adaptive [--rounds N] [--repeat] [PREFIX ...]`, resumable by cell.

A cell is a family of instructions, a drafter, a batch size and a temperature, on the embedded pair grown to 1.1 billion parameters. Some
prompts a row, of 32 tokens, go on by 64; rows enter as others finish. Speed is that of steps that read no prompt while all rows are taken:
rows that draft finish apart, and what the last of them do alone is no matter of this batch size. All settings take turns of half a second,
so that they see the same machine; a fixed one that is below DROPPED × plain in its first round, or far below it in its first tokens, takes
no more. Each round has prompts of its own, and in each "auto" is compared with what is the best of the others in all other rounds, so that
no luck of a round or of its prompts makes it the best there. With --repeat a cell that misses is measured again in REPEATS rounds, beside
its best others alone, and misses if the interval of 95 % lies below the goal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import numpy as np

from benchmarks.cells import Cell, Record, asked_of, run_with_settings
from benchmarks.families import environment_of
from benchmarks.workloads import Models, Size, check_drafted, source, trained_heads
from echelon import ConfigError, SamplingParams
from echelon.bench.report import table
from echelon.bench.throughput import DecodingMethod, EngineRun, Prompts, Run, Stepping, in_turn
from echelon.model.load.loading import LoadedModel
from echelon.ops import compiled
from echelon.stats import StepRecord

PROMPT_TOKENS, NEW_TOKENS = 32, 64
WAVES = {1: 4, 4: 4, 8: 3, 16: 2, 32: 2}  # prompts a row in a round
REPEATS, BEST = 15, 3  # rounds and others of a cell that is repeated
BATCHES, CHAINS, TREES = (1, 4, 8, 16, 32), (1, 2, 3, 4, 6, 8), (4, 12, 24, 60)
DRAFTERS = ("ngram", "draft_model", "eagle_tree")
DROPPED, HOPELESS = 0.67, 0.33  # × plain, in the first round and while it warms up
WARM_UP = 8  # tokens a row
LEVEL, GAIN, WORTH = 0.97, 1.10, 1.13  # goal of every cell; goal over the best single setting, and where it holds
Settings = dict[str, dict[str, Any] | None]


def settings_of(drafter: str, folders: Mapping[str, str]) -> Settings:
    """Plain decoding, "auto", and what it is compared with."""
    if drafter == "eagle_tree":
        base: dict[str, Any] = {"method": "eagle", "model": folders["eagle"], "tree": "dynamic"}
        fixed: Settings = {f"tree of {n}": base | {"num_speculative_tokens": n} for n in TREES}
    else:
        base = {"method": drafter} | ({"prompt_lookup_max": 2} if drafter == "ngram" else {})
        fixed = {str(n): base | {"num_speculative_tokens": n} for n in CHAINS}
        if drafter == "draft_model":
            fixed["confident"] = base | {"num_speculative_tokens": 7, "confidence_threshold": 0.3}
    return {"plain": None, "auto": base | {"num_speculative_tokens": "auto"}, **fixed}


def measure(drafter: str, batch_size: int, temperature: float, rounds: int, size: Size, only: SequenceOf[str] = ()) -> Record:
    """Tokens a second of decoding by setting, one a round, and what "auto" says of itself; `only`: the settings, all without.

    Raises
    ------
    ConfigError  a text differs from that of plain decoding, or the head has not been trained
    """
    models = Models(size, ["eagle"])
    target, folders = models.with_heads if drafter == "eagle_tree" else (models.grown, {})
    prompts = source(target, rounds * WAVES.get(batch_size, 2) * batch_size, PROMPT_TOKENS, is_ragged=False)
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    settings = settings_of(drafter, folders)
    runs = {name: FullSteps(name, settings[name], target, models.draft, batch_size) for name in only or settings}
    speeds, found = take_turns(runs, [prompts[i::rounds] for i in range(rounds)], params, batch_size)
    whole = {name: [run.decoding_speed for run in own] for name, own in found.items()}
    return {"speeds": speeds, "whole": whole, "adaptive": runs["auto"].result(batch_size, []).adaptive}


def take_turns(
    runs: Mapping[str, FullSteps], prompts: SequenceOf[Prompts], params: SamplingParams, batch_size: int
) -> tuple[dict[str, list[float]], dict[str, list[Run]]]:
    """Tokens a second of full steps, and the runs, by setting: one for each of `prompts`, with a seed of its own, step by step in turn. A
    setting that is below DROPPED × plain in its first round takes no more, and one below HOPELESS × plain while it warms up takes not even
    that (a tree of 60 nodes in a batch of 32 would keep a round for an hour); neither holds for "plain" and those that end with "auto".

    Raises
    ------
    ConfigError   a text differs from that of plain decoding, or no step of a round was full
    RuntimeError  a drafter failed
    """
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    found: dict[str, list[Run]] = {name: [] for name in runs}

    def takes_part(name: str, least: float) -> bool:
        return name.endswith(("plain", "auto")) or not speeds[name] or not speeds[name][0] < least * speeds["plain"][0]

    def take(names: SequenceOf[str], asked: Prompts, params: SamplingParams) -> None:
        done = in_turn({name: runs[name].stepping(asked, params) for name in names})
        for name in names:
            if done[name].outputs != done["plain"].outputs:
                raise ConfigError(f"{name}: a text differs from that of plain decoding")
            found[name].append(done[name])
            speeds[name].append(runs[name].full_speed)

    for name in runs:
        take(list(dict.fromkeys(("plain", name))), prompts[0][:batch_size], params.model_copy(update={"max_tokens": WARM_UP}))
    hopeful = [name for name in runs if takes_part(name, HOPELESS)]
    for name in hopeful:
        found[name], speeds[name] = [], []
        runs[name].begin()
    for turn, asked in enumerate(prompts):
        take([name for name in hopeful if takes_part(name, DROPPED)], asked, params.model_copy(update={"seed": turn}))
    if unknown := [name for name, own in speeds.items() if any(map(math.isnan, own))]:
        raise ConfigError(f"{', '.join(unknown)}: no step of a round had all rows; take more prompts, or longer texts")
    return speeds, found


class FullSteps(EngineRun):
    """A setting, and the speed of steps that read no prompt while all rows are taken, `full_speed` of the run before."""

    def __init__(
        self, name: str, config: dict[str, Any] | None, target: LoadedModel, draft: LoadedModel | None, batch_size: int, **settings: Any
    ) -> None:
        super().__init__(DecodingMethod(name, config), target, draft, batch_size, settings)
        self._batch_size, self._tokens, self._seconds = batch_size, 0, 0.0

    @property
    def full_speed(self) -> float:
        """Tokens a second; not a number where no step was full."""
        return self._tokens / self._seconds if self._seconds else math.nan

    def stepping(self, prompts: Prompts, params: SamplingParams) -> Stepping[Run]:
        self._tokens, self._seconds = 0, 0.0
        with self._llm.engine.observed(self._observe):
            done = yield from super().stepping(prompts, params)
        check_drafted(self._llm)
        return done

    def _observe(self, record: StepRecord) -> None:
        if len(record.rows) == self._batch_size and all(row.num_new == 1 for row in record.rows):
            self._tokens += sum(record.num_emitted)
            self._seconds += sum(record.seconds.values())


def in_family(family: str, drafter: str, batch_size: int, temperature: float, rounds: int, only: SequenceOf[str] = ()) -> Record:
    """The same in a process of its own that is held to a family."""
    words = [sys.executable, "-m", "benchmarks.adaptive", "--measure", f"{drafter},{batch_size},{temperature}", "--rounds", str(rounds)]
    words += [word for name in only for word in ("--only", name)]
    done = subprocess.run(words, env=os.environ | environment_of(family), stdout=subprocess.PIPE, text=True, check=True)
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


def settled(family: str, drafter: str, batch_size: int, temperature: float, rounds: int, repeats: bool) -> Record:
    """A cell, repeated where it misses, if it shall be."""
    record = in_family(family, drafter, batch_size, temperature, rounds)
    speeds = record["speeds"]
    if repeats and misses(record):
        gains = over_plain(speeds)
        others = sorted((n for n in speeds if n not in ("plain", "auto")), key=lambda n: -gains[n])
        record["repeated"] = in_family(family, drafter, batch_size, temperature, REPEATS, ["plain", "auto", *others[:BEST]])
    return record


def misses(record: Record) -> bool:
    """Whether the rounds of a cell alone are below the goal."""
    return min(ratios(record["speeds"])[:2]) < LEVEL


def over_plain(speeds: Mapping[str, SequenceOf[float]]) -> dict[str, float]:
    """Median over the rounds of each setting's speed over plain decoding's in the same round."""
    return {name: statistics.median(s / p for s, p in zip(own, speeds["plain"], strict=False)) for name, own in speeds.items()}


def ratios(speeds: Mapping[str, SequenceOf[float]]) -> tuple[float, float, str]:
    """Medians of `by_round`, and the name of the setting that is the best other one in all rounds."""
    of_plain, of_best, best = by_round(speeds)
    return statistics.median(of_plain), statistics.median(of_best), best


def by_round(speeds: Mapping[str, SequenceOf[float]]) -> tuple[list[float], list[float], str]:
    """Speed of "auto" over plain decoding and over the best other setting, which for each round the other rounds choose, a round each; and
    the name of the one that all of them choose.
    """
    auto = speeds["auto"]
    of_plain = [a / p for a, p in zip(auto, speeds["plain"], strict=True)]
    others = {name: v for name, v in speeds.items() if name != "auto" and len(v) == len(auto)}

    def best(without: int | None = None) -> str:
        rounds = [i for i in range(len(auto)) if i != without] or [0]
        return max(others, key=lambda name: statistics.median(others[name][i] / speeds["plain"][i] for i in rounds))

    return of_plain, [speed / others[best(i)][i] for i, speed in enumerate(auto)], best()


def most(values: SequenceOf[float]) -> float:
    """Where the interval of 95 % of a median ends: of resampled rounds."""
    medians = np.median(np.random.default_rng(0).choice(np.array(values), (2000, len(values))), 1)
    return float(np.quantile(medians, 0.975))


def over_single(records: SequenceOf[Record]) -> tuple[float, float]:
    """Geometric means over cells: of "auto" over the best single setting, and of the best of each cell over that."""
    medians = [over_plain(r["speeds"]) for r in records]
    names = set.intersection(*(set(m) for m in medians)) - {"auto"}
    mean = statistics.geometric_mean
    single = max(mean([m[name] for m in medians]) for name in names)
    best = mean([max(v for name, v in m.items() if name != "auto") for m in medians])
    return mean([m["auto"] for m in medians]) / single, best / single


HOW_TO_READ = (
    "A cell is FAMILY_DRAFTER_tTEMPERATURE_bBATCH, held to that family's instructions. Speeds are those of steps in which all rows run; "
    "*with the last rows* counts all steps, also those with empty places. *The best other* is the fixed length, or plain decoding, "
    "that the other rounds choose for each round, so that chance favours none; *which*: the one that all rounds together choose. *Met*: "
    f"both medians are {LEVEL} or more."
)


def as_markdown(records: Mapping[str, Record]) -> str:
    """A line for each cell, and a summary for each drafter and family."""
    return "\n\n".join(part for part in (cells_table(records), summary(records)) if part)


def cells_table(records: Mapping[str, Record]) -> str:
    """A line for each cell."""
    lines: list[tuple[str, ...]] = []
    for name, record in records.items():
        speeds, is_repeated = record.get("repeated", record)["speeds"], "repeated" in record
        of_plain, of_best, best = by_round(speeds)
        is_met = min(most(v) if is_repeated else statistics.median(v) for v in (of_plain, of_best)) >= LEVEL
        whole = f"{over_plain(record['whole'])['auto']:.2f}" if "whole" in record else "the same"
        shown = [f"{statistics.median(v):.2f}" + (f" (up to {most(v):.2f})" if is_repeated else "") for v in (of_plain, of_best)]
        lines.append((name, *shown, best, "yes" if is_met else "**no**", whole))
    parts = [HOW_TO_READ, table(["cell", "auto over plain", "over the best other", "which", "met", "over plain with the last rows"], lines)]
    if any("whole" not in record for record in records.values()):
        parts.append("The same: a record from before speeds were told apart, of two prompts a row; speed is that of the whole run.")
    return "\n\n".join(parts)


def summary(records: Mapping[str, Record]) -> str:
    """Geometric means over the batches for each drafter and family that more than one batch was measured of, each cell beside itself, so
    that cells may be of different days.
    """
    groups: dict[str, list[Record]] = {}
    for name, record in records.items():
        groups.setdefault(name.rpartition("_b")[0], []).append(record)
    lines = [(group, str(len(own)), *(f"{x:.2f}" for x in over_single(own))) for group, own in groups.items() if len(own) > 1]
    if not lines:
        return ""
    goals = f"Goals: {LEVEL} in every cell; 1.00 over the best single setting, {GAIN} where the best of every batch are {WORTH}."
    return table(["geometric mean", "batches", "auto over the best single setting", "best of every batch over it"], lines) + "\n\n" + goals


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of these settings on this processor; 1 if one fails."""
    more: dict[str, dict[str, Any]] = {"--rounds": {"type": int, "default": 4}, "--repeat": {"action": "store_true"}}
    more |= {"--measure": {"help": argparse.SUPPRESS}, "--only": {"action": "append", "default": [], "help": argparse.SUPPRESS}}
    asked = asked_of(__doc__, "adaptive", more, arguments)
    if asked.measure:
        drafter, batch_size, temperature = asked.measure.split(",")
        print(json.dumps(measure(drafter, int(batch_size), float(temperature), asked.rounds, Size(), asked.only)))
        return 0
    how = asked.rounds, asked.repeat
    wanted = [(f, d, 0.0, b) for f in dict.fromkeys((compiled.isa(), "avx2")) for d in DRAFTERS for b in BATCHES]
    wanted += [(compiled.isa(), d, 0.8, b) for d in DRAFTERS for b in (1, 8)]
    cells = [
        Cell(
            f"{family}_{drafter}_t{temperature:g}_b{batch}",
            partial(settled, family, drafter, batch, temperature, *how),
            inputs=trained_heads(["eagle"] if drafter == "eagle_tree" else []),
        )
        for family, drafter, temperature, batch in wanted
    ]
    settings = {
        "rounds": asked.rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "prompts_a_round": list(WAVES.values()),
    }

    def is_enough(record: Record) -> bool:
        return not asked.repeat or "repeated" in record or not misses(record)

    return run_with_settings(asked, cells, settings, as_markdown, is_enough)


if __name__ == "__main__":
    sys.exit(main())
