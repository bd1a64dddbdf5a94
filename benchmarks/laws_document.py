"""docs/laws.md and its plots, from the records of `benchmarks.laws`: laws with their fits, ceilings, ablations, and the paper's Table 5."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.adaptive import over_plain
from benchmarks.cells import Record
from benchmarks.document_parts import listed, picture
from benchmarks.fits import Fit, fitted, foretold
from benchmarks.verdicts import over
from echelon.bench.plot import Curve, line_chart
from echelon.bench.report import described, table
from echelon.inputs import write_text

Records = Mapping[str, Record]
Point = tuple[float, float, float, float]  # x, mean, least and most over seeds

PUBLISHED_R_SQUARED, PREDICTED_WITHIN = 0.89, 0.03
GAP_CLOSED, GREEDY_GAIN, LEVEL = 0.30, 1.14, 0.97
PUBLISHED_SHARPNESS = 1.0  # of the scores by which EAGLE-2's trees grow
LEAST_POINTS = 5  # that a form of four parameters is judged by: one more, and one to foretell
PUBLISHED = {  # Table 5, Qwen2.5-72B on 4 × H800, tokens/s by batch: plain, EAGLE-2, Scylla
    1: (60, 200, 250),
    2: (118, 400, 500),
    4: (224, 650, 800),
    8: (428, 810, 1200),
    16: (750, 830, 1650),
    32: (1239, 910, 2050),
    40: (1406, 1000, 2100),
    48: (1553, 1010, 2200),
    64: (1763, 980, 2150),
}
COLOURS = ("#2f7ed8", "#1a9850", "#762a83", "#d98c5f", "#9aa5b1")
NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "d2_s0": "Scylla, 2 layers", "d5_s0": "Scylla, 5 layers"}
OURS = "Scylla"
ABLATED = {
    "d2_s0": "as it is",
    "no_pretraining": "without pretraining",
    "no_fine_tuning": "without fine-tuning",
    "no_norm": "without the norm",
}
ABOUT = (
    "Written by `python -m benchmarks.laws` from `evidence/laws/*.json`. Scylla (Yan et al. 2025, arXiv 2505.07858) claims that tokens a "
    "step grow with the logarithm of the drafter's pretraining tokens and of its depth, and speed with that of the batch. The published "
    "constants do not reproduce the paper's own points, so the form is what is tested here. Tokens a step are those of trees of 60 nodes "
    "unless another number is named; trees of the *oracle* are drafted by the target itself, which no drafter can better."
)


def write_laws(folder: Path, records: Records) -> Path:
    """Write the page below `folder`, with the pictures of what has been measured."""
    measured = {name: record for name, record in sorted(records.items()) if "failed" not in record}
    plots = folder / "plots"
    parts = ["# Scaling laws of drafters", ABOUT, *_machines(measured)]
    parts += [*tokens_part(measured, plots), *depth_part(measured, plots), *verified_part(measured), *ablation_part(measured)]
    parts += [*speed_part(measured, plots), *tasks_part(measured)]
    return write_text(folder / "laws.md", "\n\n".join(parts) + "\n", "--output")


def _machines(records: Records) -> list[str]:
    return [f"Measured on: {described(*(r['environment'] for r in records.values()))}."] if records else ["Nothing is measured yet."]


def emitted(record: Record, temperature: float, budget: int = 60) -> float:
    """Tokens a step of a head's record."""
    found = {(t, n): e for t, n, e in record["emitted"]}
    return float(found[(temperature, budget)])


def by_tokens(records: Records, depth: int, temperature: float) -> list[Point]:
    """Tokens a step by pretraining tokens, over seeds."""
    found: dict[int, list[float]] = {}
    for name, record in records.items():
        if name.startswith(f"d{depth}_s"):
            found.setdefault(record["pretrained"], []).append(emitted(record, temperature))
    return [(tokens, statistics.fmean(v), min(v), max(v)) for tokens, v in sorted(found.items())]


def law_lines(points: list[Point], unit: str) -> list[str]:
    """The fits of points with x > 0, the best first, and how far off each foretells the last from the others."""
    known = [p for p in points if p[0] > 0]
    x, y = [p[0] for p in known], [p[1] for p in known]
    errors = foretold(x, y) if len(x) > 2 else {}

    def told(fit: Fit) -> str:
        off = f"; the last point is foretold {errors[fit.name]:+.1%} off" if fit.name in errors else ""
        return f"- {fit.name} in {unit}: {fit}; R² {fit.r_squared:.3f}, AIC {fit.aic:.1f}{off}"

    return [told(fit) for fit in sorted(fitted(x, y).values(), key=lambda f: f.aic)]


def tokens_part(records: Records, plots: Path) -> list[str]:
    """A by pretraining tokens."""
    depths = [d for d in (1, 2, 5) if by_tokens(records, d, 0.0)]
    if not depths:
        return []
    parts, panels = [], {}
    for temperature in (0.0, 1.0):
        points = {d: by_tokens(records, d, temperature) for d in depths}
        counts = sorted({p[0] for own in points.values() for p in own})
        rows = [[f"{n / 1e6:.2f}", *(_spread(next((p for p in points[d] if p[0] == n), None)) for d in depths)] for n in counts]
        parts += [f"### Temperature {temperature:g}", table(["million tokens", *map(layers, depths)], rows)]
        parts += [f"{layers(d)}:\n\n" + "\n".join(law_lines(own, "tokens")) for d, own in points.items() if len(own) > 3]
        panels[f"temperature {temperature:g}"] = [_curve(layers(d), own, c) for (d, own), c in zip(points.items(), COLOURS, strict=False)]
    shown = partial(line_chart, panels=panels, ylabel="tokens a step, 60 nodes", xlabel="pretraining tokens, thousands")
    return listed(
        "## By pretraining tokens",
        [*parts, *_what_holds(records, depths), picture(plots, "laws-tokens", "tokens a step by pretraining tokens", shown)],
    )


def _what_holds(records: Records, depths: list[int]) -> list[str]:
    """What the fits say of the published form, and of that which fits best."""
    fits, errors, counts = [], [], list[float]()
    for depth, temperature in product(depths, (0.0, 1.0)):
        known = [p for p in by_tokens(records, depth, temperature) if p[0] > 0]
        if len(known) > LEAST_POINTS:
            counts, values = [p[0] for p in known], [p[1] for p in known]
            fits.append(fitted(counts, values))
            errors.append(foretold(counts, values))
    if not fits:
        return []
    lines = []
    for form in sorted({name for fit in fits for name in fit}, key=lambda name: statistics.fmean(f[name].aic for f in fits if name in f)):
        squares, off = [f[form].r_squared for f in fits if form in f], [abs(e[form]) for e in errors if form in e]
        met = f"the last point within {PREDICTED_WITHIN:.0%} {sum(e <= PREDICTED_WITHIN for e in off)} times of {len(off)}, " if off else ""
        widest = f"at most {max(off):.1%} off" if off else "the last point not foretold"
        lines.append(f"- {form}: R² {min(squares):.3f} to {max(squares):.3f} (published {PUBLISHED_R_SQUARED}), {met}{widest}.")
    curved = [f["sigmoid"].parameters for f in fits if "sigmoid" in f]
    if curved:
        half, limits = [abs(p[3]) / 1e6 for p in curved], [p[0] + p[2] for p in curved[::2]]
        reached = [1.0 / (1.0 + (abs(p[3]) / counts[-1]) ** p[1]) for p in curved]
        lines.append(
            f"- Saturation: by the sigmoid half of what pretraining can bring is there after {min(half):.1f} to {max(half):.1f} million "
            f"tokens, {min(reached):.0%} to {max(reached):.0%} at the last point. The limit grows with depth (greedily "
            f"{', '.join(f'{limit:.1f}' for limit in limits)} tokens a step by rising depth) and the half-way point does not: what ends "
            "the growth is the size of the head. Every head is fine-tuned besides, all equally long, so that the first points are level."
        )
    return ["The forms by AIC over depths and temperatures:\n\n" + "\n".join(lines)]


def layers(depth: int) -> str:
    return f"{depth} layer{'s' * (depth > 1)}"


def _curve(name: str, points: list[Point], colour: str) -> Curve:
    known = [p for p in points if p[0] > 0]
    return Curve(name, [(round(p[0] / 1e3), p[1]) for p in known], colour, ranges=[p[2:] for p in known])


def _spread(point: Point | None) -> str:
    if point is None:
        return "–"
    return f"{point[1]:.2f}" if point[2] == point[3] else f"{point[1]:.2f} ({point[2]:.2f} to {point[3]:.2f})"


def depth_part(records: Records, plots: Path) -> list[str]:
    """A by layers, at the most pretraining tokens."""
    last = {d: points[-1] for d in (1, 2, 5) if (points := by_tokens(records, d, 0.0))}
    drawn = {d: by_tokens(records, d, 1.0)[-1] for d in last}
    if len(last) < 2:
        return []
    rows = [[d, _spread(last[d]), _spread(drawn[d])] for d in last]
    lines = law_lines([(d, *p[1:]) for d, p in last.items()], "layers")
    curves = [_depths("greedy", last, COLOURS[0]), _depths("temperature 1", drawn, COLOURS[1])]
    shown = partial(line_chart, panels={"": curves}, ylabel="tokens a step, 60 nodes", xlabel="decoder layers")
    return listed(
        "## By depth",
        [
            table(["layers", "greedy", "temperature 1"], rows),
            "\n".join(lines),
            picture(plots, "laws-depth", "tokens a step by layers", shown),
        ],
    )


def _depths(name: str, points: Mapping[int, Point], colour: str) -> Curve:
    return Curve(name, [(d, p[1]) for d, p in points.items()], colour, ranges=[p[2:] for p in points.values()])


def verified_part(records: Records) -> list[str]:
    """Heads trained on as many tokens, beside the oracle, at equal numbers of verified tokens."""
    heads = {label: records[f"{name}_t100"] for name, label in NAMES.items() if f"{name}_t100" in records}
    if len(heads) < 2 or "EAGLE" not in heads:
        return []
    oracle, parts = records.get("oracle"), []
    ours = [label for label in heads if label.startswith(OURS)]
    head = ["verified tokens", *heads, "oracle", *(f"{label}: of the gap closed, over EAGLE" for label in ours)]
    for temperature in (0.0, 1.0):
        rows = []
        for budget in [n for t, n, _ in records["eagle_t100"]["emitted"] if t == temperature]:
            values = {label: emitted(record, temperature, budget) for label, record in heads.items()}
            first, ceiling = values["EAGLE"], emitted(oracle, temperature, budget) if oracle else None
            gains = [(_closed(first, values[label], ceiling), f"{values[label] / first:.2f}") for label in ours]
            numbers = [*values.values(), *([ceiling] if ceiling else [])]
            rows.append([budget, *(f"{v:.2f}" for v in numbers), *([] if ceiling else ["–"]), *(", ".join(gain) for gain in gains)])
        parts += [f"### Temperature {temperature:g}", table(head, rows)]
    goal = (
        f"Goals: {GAP_CLOSED:.0%} of the gap from EAGLE to the oracle at temperature 1; greedy {GREEDY_GAIN} times EAGLE's at 60 "
        "(published 1.28 to 1.53); nowhere below EAGLE-3's. Greedily the oracle is the target's own text, of which a tree of 32 levels "
        "holds 32 tokens."
    )
    return listed("## Beside other heads and the ceiling", [*parts, goal, *_sharpened(records)])


def _sharpened(records: Records) -> list[str]:
    """Temperature 1 again, where trees grow by sharper scores."""
    if "sharpness" not in records:
        return []
    found = {(name, s, budget): e for name, s, budget, e in records["sharpness"]["drawn"]}
    sharp, budgets = max(s for _, s, _ in found), sorted({budget for *_, budget in found})
    ours = [name for name, label in NAMES.items() if label.startswith(OURS)]
    gap = f"{', '.join(NAMES[name].removeprefix(f'{OURS}, ') for name in ours)}: of the gap to the oracle"
    head = ["verified tokens", *NAMES.values(), "oracle", f"{gap} by its own probabilities", f"{gap} by sharpened ones"]
    rows = []
    for budget in budgets:
        drawn = {name: (found[name, PUBLISHED_SHARPNESS, budget], found[name, sharp, budget]) for name in (*NAMES, "oracle")}
        first, ceilings = drawn["eagle"][1], drawn["oracle"]
        closed = [", ".join(_closed(first, drawn[name][1], ceiling) for name in ours) for ceiling in ceilings]
        rows.append([budget, *(f"{plain:.2f} → {sharper:.2f}" for plain, sharper in drawn.values()), *closed])
    return [
        "### Temperature 1, by sharper scores",
        "A drafter knows the noise with which the target will draw, so its first choice is right more often than the probability among "
        f"perturbed logits says. Logits are multiplied by {sharp:g} before they become scores, as they are for greedy texts; the figures "
        "above are by the published scores. Before the arrow these, behind it the sharper ones, which the engine uses; gaps are those of "
        "sharper heads, to trees that the target drafts by its own probabilities and to those by sharpened ones.",
        table(head, rows),
    ]


def _closed(first: float, own: float, ceiling: float | None) -> str:
    return f"{(own - first) / (ceiling - first):.0%}" if ceiling and ceiling > first else "–"


def ablation_part(records: Records) -> list[str]:
    """What pretraining, fine-tuning and the norm bring."""
    found = {label: records[f"{name}_t100"] for name, label in ABLATED.items() if f"{name}_t100" in records}
    if len(found) < 2:
        return []
    rows = [[label, f"{emitted(r, 0.0):.2f}", f"{emitted(r, 1.0):.2f}"] for label, r in found.items()]
    return listed("## Without its parts", [table(["Scylla, 2 layers", "greedy", "temperature 1"], rows)])


def speed_part(records: Records, plots: Path) -> list[str]:
    """Table 5, and speed by the logarithm of the batch."""
    cells = {int(name.removeprefix("speed_b")): r for name, r in records.items() if name.startswith("speed_b")}
    if not cells:
        return []
    names = list(next(iter(cells.values()))["speeds"])
    medians = {b: {n: statistics.median(r["speeds"][n]) for n in names} for b, r in cells.items()}
    gains = {b: over_plain(r["speeds"]) for b, r in cells.items()}  # a setting that is dropped has one round
    rows = []
    for batch, own in medians.items():
        plain, eagle, scylla = PUBLISHED[batch]
        published = f"{scylla / plain:.2f}, {scylla / eagle:.2f}"
        told = [f"{own[n]:.0f} ({gains[batch][n]:.2f}; {cells[batch]['tokens_per_step'][n]:.2f})" for n in names]
        ahead = over(cells[batch]["speeds"], "scylla, auto", "eagle, 60 nodes")
        rows.append([batch, *told, f"{statistics.median(ahead):.2f}", published])
    head = [
        "batch",
        *(f"{n}, tokens/s (× plain; tokens a step)" for n in names),
        "Scylla over EAGLE-2",
        "published: over plain, over EAGLE-2",
    ]
    below = ", ".join(str(b) for b, own in gains.items() if own["eagle, 60 nodes"] < 1)
    short = ", ".join(str(b) for b, own in gains.items() if own["scylla, auto"] < LEVEL)
    lines = [
        "- × plain is the median of the rounds' own ratios, which the medians of speeds need not have.",
        f"- EAGLE-2 with 60 nodes is below plain decoding at batch: {below or 'none'} (published: from 32).",
        f"- Scylla with adaptive trees is below {LEVEL} × plain decoding at batch: {short or 'none'}.",
    ]
    for name in names if len(medians) > 3 else ():
        points = [(b, *[own[name]] * 3) for b, own in medians.items()]
        lines.append(f"{name}:\n\n" + "\n".join(law_lines(points, "batch")))
    curves = [Curve(n, [(b, own[n]) for b, own in medians.items()], c) for n, c in zip(names, COLOURS, strict=False)]
    shown = partial(line_chart, panels={"": curves}, ylabel="tokens per second, decoding")
    return listed("## Table 5: by batch", [table(head, rows), *lines, picture(plots, "laws-batch", "decoding speed by batch", shown)])


def tasks_part(records: Records) -> list[str]:
    """Tokens a step by category of Spec-Bench."""
    cells = {name.removeprefix("tasks_"): {(c, t): e for c, t, e in r["tasks"]} for name, r in records.items() if name.startswith("tasks_")}
    if not cells:
        return []
    keys = list(next(iter(cells.values())))
    rows = [[category, f"{t:g}", *(f"{own[(category, t)]:.2f}" for own in cells.values())] for category, t in keys]
    parts = [table(["Spec-Bench", "temperature", *cells], rows)]
    if {"scylla", "eagle"} <= cells.keys():
        gains = {c: cells["scylla"][(c, t)] / cells["eagle"][(c, t)] for c, t in keys if t == 0.0}
        told = ", ".join(f"{c} {gain:.2f}" for c, gain in sorted(gains.items(), key=lambda item: -item[1]))
        parts.append(f"Scylla over EAGLE, greedily (published: most in summarization and qa): {told}.")
    return listed("## By task", parts)
