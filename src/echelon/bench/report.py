"""Results as Markdown and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, TypeVar

from echelon.bench.phases import SPLIT
from echelon.bench.throughput import ThroughputResult
from echelon.inputs import write_text
from echelon.sizes import mebibytes

Result = TypeVar("Result")


def described(*environments: dict[str, str]) -> str:
    """The machines and their versions in one line, the commits of each at its end."""
    commits: dict[str, set[str]] = {}
    for environment in environments:
        commits.setdefault(_machine(environment), set()).add(environment["commit"])
    return "; ".join(f"{machine}, commit {', '.join(sorted(own))}" for machine, own in sorted(commits.items()))


def _machine(e: dict[str, str]) -> str:
    where = f"{e['gpu']}, {e['cpu']}" if "gpu" in e else e["cpu"]
    where += f", kernels for {e['isa']}" if "isa" in e else ""
    return f"{where}, {e['threads']} threads, torch {e['torch']}, transformers {e['transformers']}"


def table(head: SequenceOf[str], rows: SequenceOf[SequenceOf[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def columns(results: Iterable[Result], cells: Mapping[str, Callable[[Result], object]]) -> str:
    """A Markdown table with a line for each result: the head of every column, and what stands below it."""
    return table(list(cells), [[cell(r) for cell in cells.values()] for r in results])


def percent(share: float | None) -> str:
    """A share that may be unknown."""
    return "–" if share is None else f"{share:.0%}"


def over(value: float, other: float | None) -> str:
    """How often `other` goes into a value; it may be unknown, or 0."""
    return f"{value / other:.2f}" if other else "–"


def with_range(middle: float, values: SequenceOf[float]) -> str:
    """A median with the least and the largest value, which may be missing."""
    return f"{middle:,.0f} ({f'{min(values):,.0f}–{max(values):,.0f}' if values else '–'})"


def speeds_as_markdown(results: SequenceOf[ThroughputResult]) -> str:
    """Speeds with and without prefill, speed-up over our plain decoding at the same batch, acceptance, equality."""
    plain = {r.batch_size: r.decode_median for r in results if r.name == "plain"}
    return columns(
        results,
        {
            "batch": lambda r: r.batch_size,
            "method": lambda r: r.name,
            "tokens/s, decoding (min–max)": lambda r: with_range(r.decode_median, r.decode_tokens_per_second),
            "× plain": lambda r: over(r.decode_median, plain.get(r.batch_size)),
            "tokens/s, all (min–max)": lambda r: with_range(r.median, r.tokens_per_second),
            "tokens_per_step": lambda r: f"{r.tokens_per_step:.2f}",
            "accepted": lambda r: f"{r.acceptance_rate:.2f}",
            "identical": lambda r: f"{r.num_identical} of {r.num_rows}" if r.num_rows else "–",
        },
    )


def steps_as_markdown(results: SequenceOf[ThroughputResult]) -> str:
    """Where a decoding step's time goes, and what is padded, held and loaded."""
    return columns(
        [r for r in results if r.step_ms],
        {
            "batch": lambda r: r.batch_size,
            "method": lambda r: r.name,
            "ms a step": lambda r: f"{sum(r.step_ms.values()):.2f}",
            **{part: _milliseconds_of(part) for part in SPLIT},
            "padded inputs": lambda r: f"{r.padded_input_share:.0%}",
            "padded KV": lambda r: f"{r.padded_kv_share:.0%}",
            "KV reserved": lambda r: mebibytes(int(r.kv_bytes_reserved)),
            "KV loaded a step": lambda r: mebibytes(int(r.kv_bytes_touched)),
            "index": lambda r: f"{r.index_bytes / 1024:,.1f} KiB",
            "group rate": lambda r: percent(r.group_rate),
        },
    )


def _milliseconds_of(part: str) -> Callable[[ThroughputResult], str]:
    return lambda r: f"{r.step_ms[part]:.2f}"


def positions_as_markdown(results: SequenceOf[ThroughputResult]) -> str:
    """Share of drafted tokens kept, by position in the draft."""
    drafting = [r for r in results if r.accepted_by_position]
    longest = max((len(r.accepted_by_position) for r in drafting), default=0)
    rows = [(r.batch_size, r.name, *([f"{a:.2f}" for a in r.accepted_by_position] + ["–"] * longest)[:longest]) for r in drafting]
    return table(["batch", "method", *map(str, range(1, longest + 1))], rows) if rows else ""


def notes_as_markdown(results: SequenceOf[ThroughputResult]) -> str:
    """What to make of the speeds."""
    return "\n".join(f"- batch {r.batch_size}, {r.name}: {note}" for r in results for note in r.notes)


def adaptive_as_markdown(results: SequenceOf[ThroughputResult]) -> str:
    """What was decided where draft lengths are "auto", beside what happened; all runs together, warm-up included."""
    adaptive = [r for r in results if r.adaptive.get("num_steps")]
    return columns(
        adaptive,
        {
            "batch": lambda r: r.batch_size,
            "method": lambda r: r.name,
            "drafted a row's step": lambda r: f"{r.adaptive['num_proposed_tokens'] / r.adaptive['num_row_steps']:.2f}",
            "lengths verified": lambda r: ", ".join(f"{length}: {count}" for length, count in _by_length(r).items()),
            "ms predicted": lambda r: f"{r.adaptive['predicted_ms'] / r.adaptive['num_steps']:.2f}",
            "ms measured": lambda r: f"{r.adaptive['measured_ms'] / r.adaptive['num_steps']:.2f}",
            "median error": lambda r: f"{r.adaptive['prediction_error']:.1%}",
            "regret": lambda r: f"{r.adaptive['regret']:.1%}",
        },
    )


def _by_length(result: ThroughputResult) -> dict[int, int]:
    """Rows' steps by how many drafted tokens were verified."""
    found: dict[int, int] = {}
    for drafted, _, count in result.acceptance:
        found[drafted] = found.get(drafted, 0) + count
    return found


def throughput_as_markdown(results: SequenceOf[ThroughputResult], environment: dict[str, str], command: str) -> str:
    """The whole report."""
    parts = [
        "# Throughput",
        f"`{command}` on {described(environment)}.",
        "Medians of interleaved rounds. *Decoding* leaves out every step that reads a prompt, tokens and seconds alike. *All* is the whole "
        "call. "
        "*identical*: rows with the token ids of plain decoding alone.",
        speeds_as_markdown(results),
        "## A decoding step",
        "Milliseconds of steps that read no prompt, all rounds together; *layout*: choosing slots, building the batch, moving keys and "
        "values; *host*: the rest outside the models. KV is the target's.",
        steps_as_markdown(results),
    ]
    if any(r.notes for r in results):
        parts += [notes_as_markdown(results)]
    if any(r.adaptive for r in results):
        parts += ["## Adaptive lengths", adaptive_as_markdown(results)]
    if positions := positions_as_markdown(results):
        parts += ["## Drafted tokens kept, by position", positions]
    return "\n\n".join(parts) + "\n"


def write_json(path: Path, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", "--output")
