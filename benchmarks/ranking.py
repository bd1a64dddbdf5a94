"""Does `echelon drafters` rank drafters as `echelon bench throughput` does, and do its flags run as printed?

    python -m benchmarks.ranking [PREFIX ...] [--study FOLDER] [--output FOLDER]

Of a pair (a folder with `target`, and a drafter in every other folder that has a config.json) both commands run with the same prompts and
settings, and `generate` with the flags of the fastest. Cells: the embedded pair and, where FOLDER is there, the pair of `make study`, each
at a batch of 1 and of 8. Two drafters are ranked alike if both commands have them in one order, or the rounds of either
do not tell them apart: the slowest round of the faster is below the fastest of the slower.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cells import Cell, Record, asked_of, run_asked
from echelon.bench.report import table
from echelon.demo import TARGET

BATCHES = (1, 8)
SIZES = {"--num-prompts": 16, "--prompt-tokens": 128, "--max-tokens": 64, "--rounds": 3}
Rounds = Mapping[str, SequenceOf[float]]  # tokens/s of each round by drafter
PROMPT = "def main(argv):"


def drafters_of(pair: Path) -> list[Path]:
    """What could draft for the target of a pair."""
    return sorted(path.parent for path in pair.glob("*/config.json") if path.parent.name != "target")


def swapped(ours: Rounds, theirs: Rounds) -> list[tuple[str, str]]:
    """Pairs of drafters of which another one is the faster in each of two commands, in all of its rounds."""
    return [(a, b) for a, b in combinations(ours, 2) if {_faster(speeds, a, b) for speeds in (ours, theirs)} == {a, b}]


def _faster(speeds: Rounds, a: str, b: str) -> str | None:
    """Which of two is faster in all rounds."""
    return a if min(speeds[a]) > max(speeds[b]) else b if min(speeds[b]) > max(speeds[a]) else None


def echelon(*words: object) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "echelon", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measured(pair: Path, batch_size: int) -> Record:
    """Both rankings of a pair at one batch, and what the flags of the first gave."""
    sizes = [word for item in SIZES.items() for word in item]
    given = [word for path in drafters_of(pair) for word in ("--drafter", path)]
    report = json.loads(echelon("drafters", pair / "target", *given, "--batch-size", batch_size, *sizes, "--json"))
    served = [d for d in report["drafters"] if "problem" not in d]
    ours = {"plain": report["plain_rounds"]} | {d["name"]: d["rounds"] for d in served}
    configs = [word for d in served for word in ("--speculative-config", json.dumps(d["speculative_config"]))]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "throughput.json"
        where = ["--batch-sizes", batch_size, "--strategies", "unpadded", "--no-transformers", "--output", file]
        echelon("bench", "throughput", pair / "target", *configs, *where, *sizes)
        results = json.loads(file.read_text("utf-8"))["results"]
    theirs = dict(zip(ours, (r["decode_tokens_per_second"] for r in results), strict=True))
    steps = {d["name"]: [d["tokens_per_step"], r["tokens_per_step"]] for d, r in zip(served, results[1:], strict=True)}
    flags = report["flags"]
    text = echelon("generate", pair / "target", PROMPT, "--max-tokens", 16, *shlex.split(flags)) if flags else ""
    named = {name: _short(name, pair) for name in ours}
    return {
        "batch_size": batch_size,
        "drafters": {named[n]: ours[n] for n in ours},
        "throughput": {named[n]: theirs[n] for n in ours},
        "tokens_per_step": {named[n]: both for n, both in steps.items()},
        "problems": {_short(d["name"], pair): d["problem"] for d in report["drafters"] if "problem" in d},
        "swapped": [[named[a], named[b]] for a, b in swapped(ours, theirs)],
        "flags": flags.replace(f"{pair}/", ""),
        "flags_run": bool(text.strip()),
    }


def _short(name: str, pair: Path) -> str:
    """A drafter without the folder of its pair."""
    return name.replace(f"{pair}/", "")


def as_markdown(records: Mapping[str, Record]) -> str:
    """A row a cell, each with both rankings."""
    rows = [(name, _ranked(r["drafters"]), _ranked(r["throughput"]), len(r["swapped"]), r["flags"] or "–") for name, r in records.items()]
    return table(["pair and batch", "`echelon drafters`, tokens/s", "`echelon bench throughput`", "swapped", "flags, which ran"], rows)


def _ranked(speeds: Rounds) -> str:
    medians = {name: statistics.median(rounds) for name, rounds in speeds.items()}
    return ", ".join(f"{name} {speed:,.0f}" for name, speed in sorted(medians.items(), key=lambda item: -item[1]))


def main(arguments: list[str] | None = None) -> int:
    """1 if a cell failed, two drafters are swapped, or flags do not run as printed."""
    told: dict[str, Any] = {"type": Path, "default": Path("build/study"), "help": "what `make study` made"}
    asked = asked_of(__doc__, "ranking", {"--study": told}, arguments)
    pairs = {"embedded": TARGET.parent} | ({"study": asked.study} if (asked.study / "target").is_dir() else {})
    cells = [Cell(f"{name}_b{size}", partial(measured, pair, size)) for name, pair in pairs.items() for size in BATCHES]
    found, failed = run_asked(asked, cells, as_markdown)
    return int(bool(failed) or any(r["swapped"] or (r["flags"] and not r["flags_run"]) for r in found.values()))


if __name__ == "__main__":
    sys.exit(main())
