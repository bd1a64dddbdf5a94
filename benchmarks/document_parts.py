"""What docs/benchmarks.md is made from, and its parts about trained heads and other engines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain
from pathlib import Path

from benchmarks.cells import Record
from echelon.bench.peers import as_markdown
from echelon.bench.plot import Curve, line_chart
from echelon.bench.report import described, table
from echelon.bench.throughput import ThroughputResult
from echelon.methods import method_names

Cells = dict[str, Record]

HEADS = method_names(needs="head")
PUBLISHED = {1: 1.00, 2: 1.09, 4: 1.25, 8: 1.59, 16: 1.97, 24: 2.14}  # EMS / vanilla, OPT-6.7B, LLMA, Table 2 of EMS-SD


# figures


def results_of(cells: Cells, prefix: str) -> list[ThroughputResult]:
    return [ThroughputResult(**r) for name, cell in cells.items() if name.startswith(prefix) for r in cell.get("results", [])]


def plain_speed(results: list[ThroughputResult]) -> dict[int, float]:
    return {r.batch_size: r.decode_median for r in results if r.method == "plain"}


def drafting(results: list[ThroughputResult]) -> list[str]:
    """Their methods, but for plain decoding."""
    return list(dict.fromkeys(r.method for r in results if r.method != "plain"))


def by_batch(results: list[ThroughputResult], method: str) -> list[ThroughputResult]:
    return sorted((r for r in results if r.method == method), key=lambda r: r.batch_size)


def tokens_per_step(results: list[ThroughputResult]) -> str:
    values = [r.tokens_per_step for r in results]
    return f"{min(values):.2f}" if max(values) - min(values) < 0.005 else f"{min(values):.2f} to {max(values):.2f}"


def picture(plots: Path, name: str, text: str, draw: Callable[[Path], object]) -> str:
    """Draw the picture, and refer to it."""
    draw(plots / f"{name}.png")
    return f"![{text}](plots/{name}.png)"


def listed(title: str, lines: SequenceOf[str]) -> list[str]:
    """Lines below a title; nothing where there are none."""
    return [title, *lines] if lines else []


# trained heads


def heads_part(cells: Cells, plots: Path, evidence: Path) -> list[str]:
    return listed("## (d) Trained heads", [*by_batch_part(cells, plots), *verified_part(cells), *more_part(evidence)])


def by_batch_part(cells: Cells, plots: Path) -> list[str]:
    """Trained heads, as chains and as trees."""
    found = results_of(cells, "heads-")
    plain, methods = plain_speed(found), drafting(found)
    if not plain:
        return []
    gains = {m: [(r.batch_size, r.decode_median / plain[r.batch_size]) for r in by_batch(found, m)] for m in methods}
    panels = {}
    for shape in ("chain", "tree"):
        names = [m for m in methods if m.endswith(f", {shape}")]
        panels[f"{shape}s"] = [Curve(m.removesuffix(f", {shape}"), gains[m], f"C{place}") for place, m in enumerate(names)]
    rows = [
        (m, *(f"{gain:.2f}" for _, gain in gains[m]), tokens_per_step(by_batch(found, m)), f"{by_batch(found, m)[-1].acceptance_rate:.2f}")
        for m in methods
    ]
    batches = sorted({r.batch_size for r in found})
    commits: dict[str, list[str]] = {}
    for batch in batches:
        commits.setdefault(cells[f"heads-{batch:02d}"]["environment"]["commit"], []).append(str(batch))
    measured = "; ".join(f"batch {', '.join(at)} at commit {commit}" for commit, at in commits.items())
    return [
        "Heads trained on the embedded target by `make heads`, grown with it to the size of the other tables; speed-up over plain decoding "
        "at the same batch. Chains propose 4 tokens (Clover's three heads 3); trees have at most 12 nodes, "
        f"4 children a node and depth 5. Measured once each, with the heads of then: {measured}. *accepted*: share of drafted tokens at "
        "the largest batch.",
        picture(plots, "heads", "speed-up of heads", lambda p: line_chart(p, panels, "× plain decoding at the same batch", 1.0)),
        table(["× plain", *(f"B={b}" for b in batches), "tokens_per_step", "accepted"], rows),
    ]


def verified_part(cells: Cells) -> list[str]:
    """Tokens a step by tokens verified."""
    found, parts = verified(cells), []
    budgets = sorted({n for _, _, n in found})
    for temperature in sorted({t for t, _, _ in found}):
        names = dict.fromkeys(name for t, name, _ in found if t == temperature)
        rows = [(name, *(f"{found[temperature, name, n]:.2f}" for n in budgets)) for name in names]
        parts += [
            f"Tokens a step by the drafted tokens that it verifies at most, temperature {temperature:g}, on the embedded target itself (no "
            "clock). Trees are EAGLE-2's, 10 children a node and nodes a level, no path longer than 32:",
            table(["tokens_per_step", *map(str, budgets)], rows),
        ]
    if trees := [row for method in HEADS for row in cells.get(f"verified-{method}", {}).get("trees", [])]:
        gains = [(name, f"{t:g}", f"{static:.2f}", f"{dynamic:.2f}", f"{dynamic / static - 1:+.0%}") for t, name, static, dynamic in trees]
        parts += [
            "EAGLE-1's static tree of 25 nodes and EAGLE-2's dynamic ones of equal size and depth, tokens a step (no clock):",
            table(["head", "temperature", "static", "dynamic", "gain"], gains),
        ]
    return parts


def more_part(evidence: Path) -> list[str]:
    """Where what `benchmarks.ablation` and `benchmarks.plateau` found is to be read."""
    texts = {"ablation": "What the parts of heads bring", "training": "How long heads learn, and what it takes"}
    found = [f"{text}: [{name}.md](evidence/{name}.md)." for name, text in texts.items() if (evidence / f"{name}.md").exists()]
    return [" ".join(found)] if found else []


def verified(cells: Cells) -> dict[tuple[float, str, int], float]:
    """(temperature, method, tokens verified) → tokens_per_step."""
    rows = [row for method in ("draft_model", *HEADS) for row in cells.get(f"verified-{method}", {}).get("verified", [])]
    return {(t, name, n): value for t, name, n, value in rows}


def crossovers(cells: Cells) -> list[str]:
    """At which batches a tree beats its chain, and plain decoding."""
    found = results_of(cells, "heads-")
    plain, lines = plain_speed(found), []
    for method in (m.removesuffix(", tree") for m in drafting(found) if m.endswith(", tree")):
        pairs = list(zip(by_batch(found, f"{method}, chain"), by_batch(found, f"{method}, tree"), strict=True))
        over_chain = [tree.batch_size for chain, tree in pairs if tree.decode_median > chain.decode_median]
        over_plain = [tree.batch_size for _, tree in pairs if tree.decode_median > plain[tree.batch_size]]
        lines.append(f"    - {method}: ahead at {_batches(over_chain)}; ahead of plain decoding at {_batches(over_plain)}")
    return listed("- Trees of at most 12 nodes against chains of at most 4, decoding speed on the grown pair:", lines)


def _batches(sizes: list[int]) -> str:
    return f"batch {', '.join(map(str, sizes))}" if sizes else "no batch"


def verified_findings(cells: Cells) -> list[str]:
    """The best head beside the draft model with as many tokens verified."""
    found, lines = verified(cells), []
    for temperature, budget in dict.fromkeys((t, n) for t, _, n in found):
        here = {name: value for (t, name, n), value in found.items() if (t, n) == (temperature, budget)}
        chain, tree = here.pop("draft model, chain", None), here.pop("draft model, tree", None)
        if chain and tree and here:
            best = max(here, key=lambda name: here[name])
            lines.append(
                f"    - temperature {temperature:g}, {budget} tokens: {best} {here[best]:.2f}, "
                f"{here[best] / chain:.2f} × the draft model's chain ({chain:.2f}), {here[best] / tree:.2f} × its tree ({tree:.2f})"
            )
    return listed("- The best head beside the draft model at equal numbers of verified tokens, in tokens a step:", lines)


# other engines


def peers_run(path: Path) -> Record:
    """One call of `echelon bench peers --output docs/evidence/peers/NAME.json`, with the results of `ours` and `theirs`."""
    value: Record = json.loads(path.read_text("utf-8"))
    found = {"ours": value["ours"], "theirs": [peer["result"] for peer in value["peers"]]}
    return value | {side: [ThroughputResult(**r) for r in results] for side, results in found.items()}


def peers_part(runs: SequenceOf[Record]) -> list[str]:
    text = "The same prompts and the same model folder, greedy, in bfloat16 unless `--quantization` stands there, a process each."
    tables = [(f"`{r['command']}` on {described(r['environment'])}:", as_markdown([*r["ours"], *r["theirs"]], r["versions"])) for r in runs]
    return ["## (e) Beside vLLM, OpenVINO GenAI and llama.cpp", text, *chain.from_iterable(tables)] if runs else []


def peers_findings(runs: SequenceOf[Record]) -> list[str]:
    """Plain decoding against the faster plain one, our better drafter against their best mode, at every batch size."""
    lines = [line for run in runs for line in _comparisons(run)]
    return listed("- Beside other engines (decoding speed, ours over the best of theirs):", lines)


def _comparisons(run: Record) -> Iterator[str]:
    if not any(r.decode_median for r in run["ours"]):
        ours, best = run["ours"][0], max(run["theirs"], key=lambda r: r.median)
        yield f"    - first token of a prompt: {1000.0 / ours.median:,.0f} ms, {ours.median / best.median:.2f} × as fast as {best.method}"
        return
    found = re.search(r"--quantization (\w+)", run["command"])
    numbers = f"{found[1]}, " if found else ""
    for batch in sorted({r.batch_size for r in run["ours"]}):
        ours = {r.method: r for r in run["ours"] if r.batch_size == batch}
        theirs = [r for r in run["theirs"] if r.batch_size == batch]
        rivals = [r for r in theirs if r.method.endswith(", plain")]
        if "plain" in ours and rivals:
            yield _compared(f"{numbers}batch {batch}, plain decoding", ours.pop("plain"), rivals)
        if ours and theirs:
            best = max(ours.values(), key=lambda r: r.decode_median)
            yield _compared(f"{numbers}batch {batch}, best drafter (tokens_per_step {best.tokens_per_step:.2f})", best, theirs)


def _compared(what: str, ours: ThroughputResult, theirs: SequenceOf[ThroughputResult]) -> str:
    best = max(theirs, key=lambda r: r.decode_median)
    return f"    - {what}: {ours.method} {ours.decode_median / best.decode_median:.2f} × {best.method}"
