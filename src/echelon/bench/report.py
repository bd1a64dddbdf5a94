"""Results as Markdown and files."""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from echelon.bench.phases import SPLIT
from echelon.bench.throughput import ThroughputResult
from echelon.inputs import write_text
from echelon.memory import mebibytes


def described(environment: dict[str, str]) -> str:
    """The machine and the versions in one line."""
    e = environment
    where = f"{e['gpu']}, {e['cpu']}" if "gpu" in e else e["cpu"]
    return f"{where}, {e['threads']} threads, torch {e['torch']}, transformers {e['transformers']}, commit {e['commit']}"


def table(head: SequenceOf[str], rows: SequenceOf[SequenceOf[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def speeds_as_markdown(results: SequenceOf[ThroughputResult]) -> str:
    """Speeds with and without prefill, speed-up over our plain decoding at the same batch, acceptance, equality."""
    plain = {r.batch_size: r.decode_median for r in results if r.name == "plain"}
    head = [
        "batch",
        "method",
        "tokens/s, decoding (min–max)",
        "× plain",
        "tokens/s, all (min–max)",
        "tokens_per_step",
        "accepted",
        "identical",
    ]
    rows = []
    for r in results:
        low_high = f"{min(r.decode_tokens_per_second):,.0f}–{max(r.decode_tokens_per_second):,.0f}" if r.decode_tokens_per_second else "–"
        gain = f"{r.decode_median / plain[r.batch_size]:.2f}" if plain.get(r.batch_size) else "–"
        same = f"{r.num_identical} of {r.num_rows}" if r.num_rows else "–"
        speeds = f"{r.decode_median:,.0f} ({low_high})", gain, f"{r.median:,.0f} ({r.spread})"
        rows.append((r.batch_size, r.name, *speeds, f"{r.tokens_per_step:.2f}", f"{r.acceptance_rate:.2f}", same))
    return table(head, rows)


def steps_as_markdown(results: SequenceOf[ThroughputResult]) -> str:
    """Where a decoding step's time goes, and what is padded, held and loaded."""
    head = ["batch", "method", "ms a step", *SPLIT, "padded inputs", "padded KV", "KV reserved", "KV loaded a step", "index", "group rate"]
    rows = []
    for r in (r for r in results if r.step_ms):
        split = [f"{r.step_ms[part]:.2f}" for part in SPLIT]
        held = mebibytes(int(r.kv_bytes_reserved)), mebibytes(int(r.kv_bytes_touched)), f"{r.index_bytes / 1024:,.1f} KiB"
        group = "–" if r.group_rate is None else f"{r.group_rate:.0%}"
        shares = f"{r.padded_input_share:.0%}", f"{r.padded_kv_share:.0%}"
        rows.append((r.batch_size, r.name, f"{sum(r.step_ms.values()):.2f}", *split, *shares, *held, group))
    return table(head, rows)


def positions_as_markdown(results: SequenceOf[ThroughputResult]) -> str:
    """Share of drafted tokens kept, by position in the draft."""
    drafting = [r for r in results if r.accepted_by_position]
    longest = max((len(r.accepted_by_position) for r in drafting), default=0)
    rows = [(r.batch_size, r.name, *([f"{a:.2f}" for a in r.accepted_by_position] + ["–"] * longest)[:longest]) for r in drafting]
    return table(["batch", "method", *map(str, range(1, longest + 1))], rows) if rows else ""


def throughput_as_markdown(results: SequenceOf[ThroughputResult], environment: dict[str, str], command: str) -> str:
    """The whole report."""
    parts = [
        "# Throughput",
        f"`{command}` on {described(environment)}.",
        "Medians of interleaved rounds. *Decoding* leaves out every step that reads a prompt, tokens and seconds alike; where rows enter "
        "as others finish it is what a run takes longer than one that ends after two tokens a prompt. *All* is the whole call. "
        "*identical*: rows with the token ids of plain decoding alone.",
        speeds_as_markdown(results),
        "## A decoding step",
        "Milliseconds of steps that read no prompt, all rounds together; *layout*: choosing slots, building the batch, moving keys and "
        "values; *host*: the rest outside the models. KV is the target's.",
        steps_as_markdown(results),
    ]
    if positions := positions_as_markdown(results):
        parts += ["## Drafted tokens kept, by position", positions]
    return "\n\n".join(parts) + "\n"


def write_json(path: Path, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", "--output")
