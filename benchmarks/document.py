"""docs/benchmarks.md from the measured cells: tables, plots, and what the figures say, computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import adapting, adaptive, prefixes
from benchmarks.cells import Record, Records
from benchmarks.document_parts import (
    PUBLISHED,
    Cells,
    by_batch,
    crossovers,
    drafting,
    heads_part,
    listed,
    peers_findings,
    peers_part,
    peers_run,
    picture,
    plain_speed,
    results_of,
    tokens_per_step,
    verified_findings,
)
from benchmarks.families import families_part
from benchmarks.gpu_document import gpu_part
from benchmarks.quantised import quantised_part
from benchmarks.replayed import mean_tokens_per_step
from echelon.bench.latency import Latency
from echelon.bench.latency import as_markdown as latency_as_markdown
from echelon.bench.phases import SPLIT
from echelon.bench.plot import STRATEGY_COLOURS, Curve, line_chart, split_chart, strategy_lines
from echelon.bench.report import columns, described, over, percent, steps_as_markdown, table
from echelon.bench.throughput import CONFIDENT, ThroughputResult
from echelon.inputs import write_text

GAINS = {8: 0.70, 16: 0.55}  # of tokens_per_step, set for processors whose matrix units leave 40 to 80 tokens a step nearly free
COLUMNS = {  # ours → the columns of that table
    "padded": "padded (vanilla)",
    "padded-inputs": "inputs padded (unpad KV only)",
    "padded-kv": "KV padded (unpad inputs only)",
    "unpadded": "unpadded (EMS)",
}
TABLES = {
    "table-opt": "OPT, random weights, replayed",
    "table-pair": "grown pair, real drafts",
    "table-confident": "grown pair, a draft model that stops where it is not sure",
    "rescaled": "OPT, random weights, replayed at other means",
}
EQUAL_DRAFTS = ("draft model", "replay, draft model")  # as many tokens for every row
SYSTEMS = {"unpadded": "ours", "realign": "EQSPEC", "same-length": "EXSPEC"}
KINDS = {"random": "random lengths", "equal": "equal lengths"}


def write_document(folder: Path, expected: SequenceOf[str], settings: dict[str, Any]) -> Path:
    """From the cells that were measured with these settings; of those `expected`, it says which are missing."""
    evidence, plots = folder / "evidence", folder / "plots"
    found = Records(evidence / "benchmarks").read()
    cells = {name: cell for name, cell in found.items() if name in expected and cell["settings"] == settings}
    runs = [peers_run(path) for path in sorted((evidence / "peers").glob("*.json"))]
    parts = [
        introduction(cells, expected),
        "\n".join([findings(cells), *peers_findings(runs)]),
        *padding_part(cells, plots),
        *realign_part(cells, plots),
        *gain_part(cells, plots),
        *heads_part(cells, plots, evidence),
        *peers_part(runs),
        *families_part(evidence / "families"),
        *quantised_part(evidence / "quantised"),
        *measured_part("## Adaptive lengths: `python -m benchmarks.adaptive`", evidence / "adaptive", adaptive.cells_table),
        adaptive.summary(measured(evidence / "adaptive")),
        *measured_part("## What deciding costs: `python -m benchmarks.adapting`", evidence / "adapting", adapting.as_markdown),
        *measured_part("## Prefixes that are kept: `python -m benchmarks.prefixes`", evidence / "prefixes", prefixes.as_markdown),
        *gpu_part(evidence / "gpu_check.json"),
    ]
    return write_text(folder / "benchmarks.md", "\n\n".join(p for p in parts if p) + "\n", "--output")


def measured_part(title: str, folder: Path, as_markdown: Callable[[dict[str, Record]], str]) -> list[str]:
    """A table for every machine and commit that the folder has records of."""
    groups: dict[str, dict[str, Record]] = {}
    for name, record in measured(folder).items():
        groups.setdefault(described(record["environment"]), {})[name] = record
    return [title, *(part for where, own in groups.items() for part in (f"On {where}.", as_markdown(own)))] if groups else []


def measured(folder: Path) -> dict[str, Record]:
    """The folder's records but for those of cells that failed."""
    return {name: record for name, record in Records(folder).read().items() if "failed" not in record}


def missing(cells: Cells, expected: SequenceOf[str]) -> list[str]:
    """Of experiments that are not complete, the batch sizes that are not there."""
    gone: dict[str, list[str]] = {}
    for name in sorted(n for n in expected if n not in cells):
        experiment, _, batch = name.rpartition("-")
        gone.setdefault(experiment if batch.isdigit() else name, []).append(batch.lstrip("0") if batch.isdigit() else "")
    count = sum(map(len, gone.values()))
    lines = [f"    - `{name}`" + (f" at batch {', '.join(batches)}" if batches[0] else "") for name, batches in gone.items()]
    return listed(f"- **This is a part**: {count} of {len(expected)} cells have not been measured:", lines)


def introduction(cells: Cells, expected: SequenceOf[str]) -> str:
    machines = dict.fromkeys(described(c["environment"]) for c in cells.values())
    minutes = sum(c["seconds"] for c in cells.values()) / 60
    failed = [f"- not measured: `{name}`: {c['failed']}" for name, c in cells.items() if "failed" in c]
    return "\n".join(
        [
            "# Benchmarks",
            "",
            f"Written by `python -m benchmarks.tables` from `evidence/benchmarks/*.json` ({len(cells)} cells, {minutes:.0f} minutes of "
            "measuring). Machines and commits:",
            "",
            *(f"- {m}" for m in machines),
            *failed,
            *missing(cells, expected),
            "",
            "Figures are medians of interleaved rounds: three, and in some cells of an earlier day one or two. "
            "Speeds are those of *decoding*: in static batches every step that reads a prompt is left out, its tokens and its seconds "
            "(EMS-SD leaves out its seconds and counts its tokens); where rows enter as others finish, the speed is that of all tokens "
            "after the second of every prompt.",
            "",
            "All strategies run in the same engine, drop finished rows at once and emit the extra token after full acceptance, unlike the "
            "published baselines. What separates them is padding, copying and masking, and that strategies besides `unpadded` use the "
            "framework's attention: how much that is shows at batch 1, where nothing is padded. No ratio between `unpadded` and another "
            "strategy on this page is one of padding alone; those are measured by `python -m benchmarks.alike`: [claims](claims.md).",
        ]
    )


def findings(cells: Cells) -> str:
    """What the figures say about the promises, and where speculation loses; every sentence is computed."""
    found = (slower_than_others, ratios_beside_kernels, gains_missed, losses, crossovers, verified_findings)
    said = [line for finding in found for line in finding(cells)]
    return "\n".join(["## What the figures say", "", *(said or ["- nothing has been measured yet"])])


def groups(cells: Cells) -> Iterator[tuple[str, str, int, dict[str, ThroughputResult]]]:
    """(experiment, method, batch size, its results by strategy) of every comparison."""
    for name in (*TABLES, "gain", "realign-random", "realign-equal"):
        found = results_of(cells, name)
        for method, batch in product(drafting(found), sorted({r.batch_size for r in found})):
            yield name, method, batch, {r.strategy: r for r in found if r.method == method and r.batch_size == batch}


def slower_than_others(cells: Cells) -> list[str]:
    compared = [
        (f"{name}, {method}, batch {batch}", found["unpadded"], max(found.values(), key=lambda r: r.decode_median))
        for name, method, batch, found in groups(cells)
        if batch > 1 and len(found) > 1 and "unpadded" in found
    ]
    if not compared:
        return []
    beaten = [
        f"    - {what}: {best.strategy} by {best.decode_median / ours.decode_median - 1:.0%}"
        for what, ours, best in compared
        if best is not ours
    ]
    return [
        f"- `unpadded` is the fastest strategy in {len(compared) - len(beaten)} of {len(compared)} comparisons at batch 2 and "
        f"more{':' if beaten else '.'} It has attention kernels of its own, the others the framework's.",
        *beaten,
    ]


def ratio(found: dict[str, ThroughputResult]) -> float | None:
    """unpadded over padded."""
    speed = {strategy: r.decode_median for strategy, r in found.items()}
    return speed["unpadded"] / speed["padded"] if speed.get("padded") and "unpadded" in speed else None


def ratios_beside_kernels(cells: Cells) -> list[str]:
    """Unpadded over padded where drafts differ in length, as LLMA's do, beside what other kernels alone make of it."""
    found = [(batch, value) for _, method, batch, own in groups(cells) if method not in EQUAL_DRAFTS and (value := ratio(own)) is not None]
    padded, alone = ([value for batch, value in found if batch in batches] for batches in ((8, 16), (1,)))
    if not padded:
        return []
    kernels = f"; at batch 1, where nothing is padded, it is {min(alone):.2f} to {max(alone):.2f}" if alone else ""
    return [
        f"- `unpadded` over `padded` is {min(padded):.2f} to {max(padded):.2f} at batch 8 and 16 in {len(padded)} comparisons whose drafts "
        f"differ in length, as LLMA's do{kernels}. The two run different attention kernels, so that no published ratio is reached or "
        "missed by these: with the same kernels, and beside the published ratios, they stand in [claims](claims.md)."
    ]


def gains_missed(cells: Cells) -> list[str]:
    """Speed-ups against the share of tokens_per_step that the project has set itself."""
    found = results_of(cells, "gain")
    plain = plain_speed(found)
    shares = [
        (r, r.decode_median / plain[r.batch_size] / r.tokens_per_step, GAINS[r.batch_size])
        for r in found
        if r.method != "plain" and r.batch_size in GAINS
    ]
    lines = [
        f"    - {r.method}, batch {r.batch_size}: {share:.2f} {'reaches' if share >= goal else 'misses'} {goal:.2f}"
        for r, share, goal in shares
    ]
    return listed("- Speed-up over plain decoding as a share of tokens_per_step, code continuation on the grown pair:", lines)


def losses(cells: Cells) -> list[str]:
    """Where unpadded speculation is slower than plain decoding at the same batch."""
    gains = [
        (f"{name}, {method}, batch {batch}", found["unpadded"].decode_median / plain)
        for name, method, batch, found in groups(cells)
        if "unpadded" in found and (plain := plain_speed(results_of(cells, name)).get(batch))
    ]
    if not gains:
        return []
    lost = [f"    - {what}: {gain:.2f} × plain decoding" for what, gain in gains if gain < 1]
    head = f"- **Where speculation loses**: in {len(lost)} of {len(gains)} comparisons `unpadded` speculation is slower than plain decoding"
    return [head + (":" if lost else "."), *lost]


def padding_part(cells: Cells, plots: Path) -> list[str]:
    parts = [
        "## (a) What padding costs: Table 2 of EMS-SD",
        "Tokens per second of decoding, in brackets over plain decoding at the same batch. One static batch a cell, prompts of half to "
        f"all of {setting(cells, 'prompt_tokens')} tokens, read once for all methods, {setting(cells, 'table_tokens')} new tokens each. "
        "*published* is EMS over vanilla for OPT-6.7B with LLMA on a GPU.",
        law_text(cells),
    ]
    for name, title in TABLES.items():
        found = results_of(cells, name)
        methods = drafting(found)
        if not methods:
            continue
        panels = {m: strategy_lines(found, m) for m in methods}
        largest = max(r.batch_size for r in found)
        bars = {r.name: r.step_ms for r in sorted(found, key=lambda r: r.method) if r.batch_size == largest}
        parts.append(f"### {title}: {model_text(cells, name)}")
        for method in methods:
            own = [r for r in found if r.method == method]
            parts += [f"**{method}**, tokens_per_step {tokens_per_step(own)}", padding_table(own, plain_speed(found))]
        parts += [
            picture(plots, name, "decoding speed by batch size", partial(line_chart, panels=panels, ylabel="tokens per second, decoding")),
            picture(plots, f"{name}-steps", f"a step at batch {largest}", partial(split_chart, bars=bars)),
            "Where a step's time goes and what is padded, held and loaded (all of it: in the evidence files):",
            steps_as_markdown([r for r in found if r.batch_size in (8, largest) and r.method in ("plain", methods[0])]),
        ]
    return parts


def setting(cells: Cells, name: str) -> Any:
    """Of the first cell: cells of one run agree."""
    return next(iter(cells.values()))["settings"][name] if cells else "–"


def model_text(cells: Cells, name: str) -> str:
    if name not in ("table-pair", "table-confident"):
        shapes = [" × ".join(map(str, setting(cells, key))) for key in ("opt", "opt_draft")]
        return f"bfloat16, hidden × layers × heads {shapes[0]}, draft model {shapes[1]}"
    parameters = setting(cells, "pair_parameters")
    return f"the embedded target at {parameters / 1e9:.1f} B parameters" if parameters else "the embedded target as it is"


def law_text(cells: Cells) -> str:
    found = cells.get("histogram", {}).get("histograms")
    if not found:
        return ""
    assert CONFIDENT.config is not None
    means = ", ".join(f"{name} {mean_tokens_per_step(h):.2f}" for name, h in found.items())
    return (
        f"Replayed acceptance: the joint histogram of drafted and accepted tokens measured on the embedded pair "
        f"(tokens_per_step: {means}), "
        "and LLMA's tilted exponentially to 2, 3 and 4.2. `replay, draft model` runs a draft model of its own and replays what is kept. "
        "Drafts of equal length leave no inputs to pad, which is why a draft model's ratios lie below LLMA's; the `confident draft model` "
        f"drafts at most {CONFIDENT.config['num_speculative_tokens']} tokens as long as it gives the whole of them "
        f"{CONFIDENT.config['confidence_threshold']:.0%}, so its drafts differ in length, as LLMA's do."
    )


def padding_table(found: list[ThroughputResult], plain: dict[int, float]) -> str:
    rows = []
    for batch in sorted({r.batch_size for r in found}):
        own = {r.strategy: r for r in found if r.batch_size == batch}
        base = plain.get(batch, 0.0)
        speeds = [f"{own[s].decode_median:,.1f} ({own[s].decode_median / base:.2f})" if s in own and base else "–" for s in COLUMNS]
        value = ratio(own)
        rows.append((batch, f"{base:,.1f}", *speeds, "–" if value is None else f"**{value:.2f}**", PUBLISHED.get(batch, "–")))
    return table(["B", "plain", *COLUMNS.values(), "unpadded / padded, other attention kernels too", "published"], rows)


def realign_part(cells: Cells, plots: Path) -> list[str]:
    parts = [
        "## (b) What realigning costs: EQSPEC and EXSPEC",
        "Draft model, 4 tokens; rows enter as others finish; EXSPEC's window is 3 × B. Ours has other attention kernels than theirs.",
    ]
    panels, shares = {}, {}
    for kind, title in KINDS.items():
        found = results_of(cells, f"realign-{kind}")
        if found:
            parts += [f"**Prompts of {title}**", realign_table(found)]
            panels[title] = [system_line(found, s, lambda r: r.decode_median) for s in SYSTEMS]
            shares[title] = [system_line(found, s, overhead) for s in SYSTEMS]
    if panels:
        parts += [
            picture(plots, "realign", "decoding speed by batch size", lambda p: line_chart(p, panels, "tokens per second, decoding")),
            picture(plots, "realign-overhead", "overhead share", lambda p: line_chart(p, shares, "share of a step in layout and host")),
        ]
    rest = [*equality_part(cells), *latency_part(cells)]
    return [*parts, *rest] if panels or rest else []


def overhead(result: ThroughputResult) -> float:
    """Share of a step in neither model nor verification: the papers' alignment overhead."""
    total = sum(result.step_ms.get(part, 0.0) for part in SPLIT)
    return (result.step_ms["layout"] + result.step_ms["host"]) / total if total else 0.0


def system_line(found: list[ThroughputResult], strategy: str, value: Callable[[ThroughputResult], float]) -> Curve:
    own = sorted((r for r in found if r.strategy == strategy and r.method != "plain"), key=lambda r: r.batch_size)
    return Curve(SYSTEMS[strategy], [(r.batch_size, value(r)) for r in own], STRATEGY_COLOURS[strategy])


def realign_table(found: list[ThroughputResult]) -> str:
    plain = plain_speed(found)
    return columns(
        [r for r in found if r.method != "plain"],
        {
            "B": lambda r: r.batch_size,
            "system": lambda r: SYSTEMS[r.strategy],
            "plain, tokens/s": lambda r: f"{plain.get(r.batch_size, 0.0):,.1f}",
            "tokens/s, decoding": lambda r: f"{r.decode_median:,.1f}",
            "× plain": lambda r: over(r.decode_median, plain.get(r.batch_size)),
            "tokens/s, all": lambda r: f"{r.median:,.1f}",
            "overhead": lambda r: f"{overhead(r):.0%}",
            "group rate": lambda r: percent(r.group_rate),
            "tokens_per_step": lambda r: f"{r.tokens_per_step:.2f}",
        },
    )


def equality_part(cells: Cells) -> list[str]:
    found: list[Record] = cells.get("equality", {}).get("equality", [])
    if not found:
        return []
    text = (
        "**Equality** with plain decoding at batch 1, embedded pair, bfloat16, token ids cut at the end of the text; "
        f"differences that are no tie of rounding: {sum(r['num_faults'] for r in found)}. "
        "EQSPEC's authors report 90.8 to 97.3 %. `transformers` is compared with itself."
    )
    by_system = columns(
        sorted(found, key=lambda r: ([*SYSTEMS, r["strategy"]].index(r["strategy"]), r["batch_size"])),
        {
            "B": lambda r: r["batch_size"],
            "system": lambda r: SYSTEMS.get(r["strategy"], r["strategy"]),
            "drafter": lambda r: r["drafter"],
            "exact match": lambda r: f"{r['exact_match']:.0%}",
            "partial match": lambda r: f"{r['partial_match']:.1%}",
        },
    )
    return [text, by_system]


def _middle(values: SequenceOf[Any]) -> Any:
    """The median of numbers; what is the same in all rounds, else."""
    return statistics.median(values) if all(isinstance(value, float) for value in values) else values[0]


def latency_part(cells: Cells) -> list[str]:
    rounds: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for r in (r for cell in cells.values() for r in cell.get("latencies", [])):
        rounds.setdefault((r["batch_size"], r["method"], r["strategy"]), []).append(r)
    found = [Latency(**{k: _middle([r[k] for r in own]) for k in own[0]}) for own in rounds.values()]
    text = "**Latencies** under arrivals (their Table 4): Poisson, the same moments for all, at 80 % of what ours serves."
    return [text, latency_as_markdown(found)] if found else []


def gain_part(cells: Cells, plots: Path) -> list[str]:
    """Speed-up over plain decoding at the same batch, unpadded."""
    panels, rows = {}, []
    for name, title in (TABLES | {"gain": "grown pair, rows enter as others finish"}).items():
        found = results_of(cells, name)
        plain, steps, lines = plain_speed(found), {r.batch_size: step_seconds(r) for r in found if r.method == "plain"}, []
        for place, method in enumerate(drafting(found)):
            own = [r for r in by_batch(found, method) if r.strategy == "unpadded"]
            gains = [(r, r.decode_median / plain[r.batch_size]) for r in own if plain.get(r.batch_size)]
            lines.append(Curve(f"{method}, τ {tokens_per_step(own)}", [(r.batch_size, gain) for r, gain in gains], f"C{place}"))
            rows += [gain_row(name, r, gain, plain[r.batch_size], step_seconds(r) / steps[r.batch_size]) for r, gain in gains]
        if lines:
            panels[title] = lines
    if not panels:
        return []
    return [
        "## (c) What speculation brings over plain decoding at the same batch",
        "In a static batch rows finish at different times, plain rows all at once: the places that stay empty are part of its figures. "
        f"In `gain` {setting(cells, 'gain_prompt_tokens')} tokens of source go on by {setting(cells, 'gain_tokens')}, and rows enter "
        "as others finish; the last rows of a run still thin out. *step*: what a step with drafts costs, × one without; "
        "tokens_per_step over it is all that can be gained where no place stays empty. Where a few tokens a row already keep the "
        "arithmetic units busy (bfloat16 without AMX: from 8 to 12 tokens a step at 400 GFLOP/s, from about 20 at 600), a drafted token "
        "costs nearly what a plain one does.",
        picture(plots, "gain", "speed-up over plain decoding", lambda p: line_chart(p, panels, "× plain decoding at the same batch", 1.0)),
        table(
            [
                "experiment",
                "method",
                "B",
                "plain, tokens/s",
                "tokens/s",
                "tokens_per_step",
                "step, × plain's",
                "× plain",
                "of tokens_per_step",
            ],
            rows,
        ),
    ]


def step_seconds(result: ThroughputResult) -> float:
    """Milliseconds of a step, drafting and host included."""
    return sum(result.step_ms.values())


def gain_row(name: str, result: ThroughputResult, gain: float, plain: float, step: float) -> tuple[object, ...]:
    speeds = f"{plain:,.1f}", f"{result.decode_median:,.1f}", f"{result.tokens_per_step:.2f}", f"{step:.2f}"
    return name, result.method, result.batch_size, *speeds, f"{gain:.2f}", f"{gain / result.tokens_per_step:.2f}"
