"""The part of docs/benchmarks.md about trained heads, and about trees of a draft model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Cells, by_batch, picture, plain_speed, results_of, tokens_per_step
from echelon.bench.plot import Curve, line_chart
from echelon.bench.report import table
from echelon.methods import method_names

HEADS = method_names(needs="head")


def heads_part(cells: Cells, plots: Path, evidence: Path) -> list[str]:
    parts = [*by_batch_part(cells, plots), *verified_part(cells), *more_part(evidence)]
    return ["## (d) Trained heads", *parts] if parts else []


def by_batch_part(cells: Cells, plots: Path) -> list[str]:
    """Trained heads, as chains and as trees."""
    found = results_of(cells, "heads-")
    plain, shapes = plain_speed(found), {"chain": ", chain", "tree": ", tree"}
    batches = sorted({r.batch_size for r in found})
    if not plain:
        return []
    methods = list(dict.fromkeys(r.method for r in found if r.method != "plain"))
    gains = {m: [(r.batch_size, r.decode_median / plain[r.batch_size]) for r in by_batch(found, m)] for m in methods}
    panels = {}
    for shape, ending in shapes.items():
        names = [m for m in methods if m.endswith(ending)]
        panels[f"{shape}s"] = [Curve(m.removesuffix(ending), gains[m], f"C{place}") for place, m in enumerate(names)]
    rows = [
        (m, *(f"{gain:.2f}" for _, gain in gains[m]), tokens_per_step(by_batch(found, m)), f"{by_batch(found, m)[-1].acceptance_rate:.2f}")
        for m in methods
    ]
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
    trees = [row for method in HEADS for row in cells.get(f"verified-{method}", {}).get("trees", [])]
    gains = [(name, f"{t:g}", f"{static:.2f}", f"{dynamic:.2f}", f"{dynamic / static - 1:+.0%}") for t, name, static, dynamic in trees]
    if gains:
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


def heads_findings(cells: Cells) -> list[str]:
    return [*crossovers(cells), *verified_findings(cells)]


def crossovers(cells: Cells) -> list[str]:
    """At which batches a tree beats its chain, and plain decoding."""
    found = results_of(cells, "heads-")
    if not found:
        return []
    plain, lines = plain_speed(found), []
    for method in dict.fromkeys(r.method.removesuffix(", tree") for r in found if r.method.endswith(", tree")):
        pairs = list(zip(by_batch(found, f"{method}, chain"), by_batch(found, f"{method}, tree"), strict=True))
        over_chain = [tree.batch_size for chain, tree in pairs if tree.decode_median > chain.decode_median]
        over_plain = [tree.batch_size for _, tree in pairs if tree.decode_median > plain[tree.batch_size]]
        lines.append(f"  - {method}: ahead at {_batches(over_chain)}; ahead of plain decoding at {_batches(over_plain)}")
    return ["- Trees of at most 12 nodes against chains of at most 4, decoding speed on the grown pair:", *lines]


def _batches(sizes: list[int]) -> str:
    return f"batch {', '.join(map(str, sizes))}" if sizes else "no batch"


def verified_findings(cells: Cells) -> list[str]:
    """The best head beside the draft model with as many tokens verified."""
    found = verified(cells)
    lines = []
    for temperature, budget in dict.fromkeys((t, n) for t, _, n in found):
        here = {name: value for (t, name, n), value in found.items() if (t, n) == (temperature, budget)}
        chain, tree = here.pop("draft model, chain", None), here.pop("draft model, tree", None)
        if chain is None or tree is None or not here:
            continue
        best = max(here, key=lambda name: here[name])
        lines.append(
            f"  - temperature {temperature:g}, {budget} tokens: {best} {here[best]:.2f}, "
            f"{here[best] / chain:.2f} × the draft model's chain ({chain:.2f}), {here[best] / tree:.2f} × its tree ({tree:.2f})"
        )
    return ["- The best head beside the draft model at equal numbers of verified tokens, in tokens a step:", *lines] if lines else []
