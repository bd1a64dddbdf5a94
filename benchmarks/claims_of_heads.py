"""What Medusa (Cai et al. 2024) and Clover (Xiao et al. 2024) claim of heads, and what was measured of it; and figures of heads."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.document_parts import verified
from benchmarks.fits import fitted
from benchmarks.reasons import NOT_KEPT, dear_steps, step_ms
from benchmarks.verdicts import AtLeast, Claim, Crosses, Evidence, Measured, Ordered, labelled, medians, middle, over, sampled

BATCHES = (1, 2, 4, 8, 16, 32)
HEADS_COMMAND = "python -m benchmarks.tables heads"
VERIFIED_COMMAND = "python -m benchmarks.tables verified"
ABLATION_COMMAND = "python -m benchmarks.ablation {} --num-continuations 4096"
SPEC_BENCH = "python -m benchmarks.categories --questions question.jsonl {}"
SPEC_BENCH_NAMES = {
    "ngram": "copying from the prompt (PLD)",
    "draft_model": "a draft model (SpS)",
    "medusa": "Medusa",
    "eagle": "EAGLE-2",
    "eagle3": "EAGLE-3",
}
TOKENS_A_BATCH = 2056
EASY = "held-out Python source, which is easier to guess than conversations"


# figures


def speed_up(method: str, batch: int, evidence: Evidence) -> Measured | None:
    """Of a trained head over plain decoding on the grown pair."""
    name = f"benchmarks/heads-{batch:02d}"
    found = over(evidence.speeds(name), (method, "unpadded"), ("plain", "unpadded"))
    a_step = [r.tokens_per_step for r in evidence.results(name) if r.method == method]
    return sampled(found, note=f"{a_step[0]:.2f} tokens a step") if found else None


def by_batch(method: str, evidence: Evidence, first: int = 1) -> Measured | None:
    """A method over plain decoding, by batch from `first` on."""
    speeds = {b: evidence.speeds(f"benchmarks/heads-{b:02d}") for b in BATCHES if b >= first}
    return medians({f"batch {b}": over(s, (method, "unpadded"), ("plain", "unpadded")) for b, s in speeds.items()})


def tree_over_chain(method: str, is_speed: bool, evidence: Evidence) -> Measured | None:
    """Tokens a step, or speed, of trees of at most 12 nodes over those of chains, at batch 1."""
    if is_speed:
        return sampled(over(evidence.speeds("benchmarks/heads-01"), (f"{method}, tree", "unpadded"), (f"{method}, chain", "unpadded")))
    found = {b: {r.method: r.tokens_per_step for r in evidence.results(f"benchmarks/heads-{b:02d}")} for b in BATCHES}
    return sampled([own[f"{method}, tree"] / own[f"{method}, chain"] for own in found.values() if f"{method}, tree" in own])


def trained(method: str, evidence: Evidence) -> dict[str, Any]:
    """How a head was trained and what it reached."""
    runs = (evidence.record("training") or {}).get("runs", [])
    return next((dict(run) for run in runs if run["method"] == method), {})


def top1(method: str, head: int, evidence: Evidence) -> Measured | None:
    run = trained(method, evidence)
    return sampled([run["top1"][head - 1]], "{:.3f}") if run else None


def few_batches(method: str, published: str, evidence: Evidence) -> str:
    """How little a head has learned from, beside the published one."""
    run = trained(method, evidence)
    if not run:
        return "no head has been trained for it here"
    tokens, minutes = run["batches"] * TOKENS_A_BATCH, run["reached"] * run["seconds_a_batch"] / 60
    return (
        f"the head was trained on {run['batches']} batches ({tokens / 1e6:.1f} million tokens, {minutes:.0f} minutes on two cores), the "
        f"published one on {published}"
    )


def few_and_dear(head: str, learned: str, name: str, method: str, published: float, evidence: Evidence) -> str:
    return f"{few_batches(head, learned, evidence)}; besides, {dear_steps(name, method, published, evidence)}"


def tree_and_chain(head: str, learned: str, evidence: Evidence) -> str:
    """What steps of a head's tree and of its chain take and emit."""
    found = {r.method: r for r in evidence.results("benchmarks/heads-01") if r.step_ms}
    tree, chain = (found.get(f"{head}, {form}") for form in ("tree", "chain"))
    if not tree or not chain:
        return NOT_KEPT
    told = " and ".join(f"{step_ms(r):.0f} ms for {r.tokens_per_step:.2f} tokens" for r in (tree, chain))
    return f"{few_batches(head, learned, evidence)}; a step of its tree and one of its chain take {told}"


def cells_of(variant: str, evidence: Evidence) -> list[dict[str, Any]]:
    """Cells of the ablation, one a seed."""
    return list((evidence.record("ablation") or {}).get("cells", {}).get(variant, []))


def by_seed(one: str, other: str, evidence: Evidence) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    others = {c["seed"]: c for c in cells_of(other, evidence)}
    return [(c, others[c["seed"]]) for c in cells_of(one, evidence) if c["seed"] in others]


def spec_bench(method: str, what: str, evidence: Evidence) -> Measured | None:
    """The harness's own metric over all categories: tokens a step of drafts of the published length, or mean tokens a second over the
    baseline's, with drafts as long as the engine decides where that has been measured.
    """
    record = evidence.record(f"categories/{method}_b1_t0")
    if not record:
        return None
    note, found = f"{record['num_questions']} questions", record["overall"][what]
    if what == "speed_up" and "auto" in record:
        note, found = f"{note}; {found:.2f} with drafts of the published length", record["auto"]["overall"][what]
    return sampled([found], note=note)


def dear_answers(method: str, evidence: Evidence) -> str:
    """What an answer costs by its steps, of the drafts that the row is judged by."""
    record = evidence.record(f"categories/{method}_b1_t0")
    if not record:
        return "it has not been measured"
    own = record.get("auto", record)["overall"]
    emitted, gain = own["tokens_per_step"], own["speed_up"]
    return (
        f"a step with drafts emits {emitted:.2f} tokens and takes, with its share of reading the prompts, {emitted / gain:.1f} times as "
        "long as a plain one"
    )


def by_task(method: str, evidence: Evidence) -> str:
    """What a step emits by task."""
    tasks = (evidence.record(f"categories/{method}_b1_t0") or {}).get("tasks", {})
    emitted = ", ".join(f"{name} {task['tokens'] / task['steps']:.2f}" for name, task in tasks.items() if task["steps"])
    return f"the target was trained on Python source and on none of these tasks; tokens a step are {emitted}"


def spec_bench_rows(method: str, speed: float, tokens: float) -> list[Claim]:
    """Two rows of Spec-Bench's leaderboard, by its own metric."""
    what = SPEC_BENCH_NAMES[method]
    size = "Vicuna-13B" if method == "eagle3" else "Vicuna-7B"
    command = SPEC_BENCH.format(f"{method}_b1_t0")
    return [
        Claim(
            f"spec-bench-{method}-speed",
            f"On Spec-Bench {what} is {speed} times as fast as plain decoding at batch 1.",
            f"{speed} ({size}, A100)",
            command,
            AtLeast(speed),
            partial(spec_bench, method, "speed_up"),
            why=partial(dear_answers, method),
        ),
        Claim(
            f"spec-bench-{method}-tokens",
            f"On Spec-Bench {what} emits {tokens} tokens a step.",
            f"{tokens} ({size})",
            command,
            AtLeast(tokens),
            partial(spec_bench, method, "tokens_per_step"),
            why=partial(by_task, method),
        ),
    ]


def extra_tokens(evidence: Evidence) -> Measured | None:
    """Clover's extra tokens a step over Medusa's, in per cent, by seed."""
    emitted_by = [(a["trees"]["budget 4"], b["trees"]["budget 4"]) for a, b in by_seed("clover-full", "clover-medusa", evidence)]
    return sampled([100 * ((a["tokens_per_step"] - 1) / (b["tokens_per_step"] - 1) - 1) for a, b in emitted_by], "{:+.0f} %")


def points(head: int, evidence: Evidence) -> Measured | None:
    """Points of top-5 accuracy that all blocks bring to a head."""
    return sampled(
        [100 * (a["top5"][head - 1] - b["top5"][head - 1]) for a, b in by_seed("clover-full", "clover-medusa", evidence)], "{:.1f}"
    )


def points_by_head(evidence: Evidence) -> Measured | None:
    found = {h: points(h, evidence) for h in (1, 2, 3)}
    return labelled({f"head {h}": m.median if m else None for h, m in found.items()}, "{:.1f}")


def ladder(evidence: Evidence) -> Measured | None:
    names = {"Medusa": "medusa", "augmenting": "augmenting", "regressive": "regressive", "attention decoder": "full"}
    found = {n: [c["trees"]["budget 4"]["tokens_per_step"] - 1 for c in cells_of(f"clover-{v}", evidence)] for n, v in names.items()}
    return labelled({n: middle(v) for n, v in found.items()}, "{:.2f}")


def little_text(evidence: Evidence) -> str:
    batches = next((c["plan"]["steps"] for c in cells_of("clover-full", evidence)), 0)
    tokens = batches * TOKENS_A_BATCH / 1e6
    return (
        f"the heads that are compared were trained on {tokens:.2f} million tokens each; the published ones, of 200 million weights, on 150 "
        "million"
    )


def clover(size: str, batch: int, other: str, evidence: Evidence) -> Measured | None:
    """Clover's tree of 4 tokens over plain decoding or over Medusa's."""
    speeds = evidence.speeds(f"clover/{size}_b{batch:02d}")
    if other == "plain":
        return sampled(over(speeds, ("clover, 4", "unpadded"), ("plain", "unpadded")))
    pairs = zip(
        over(speeds, ("clover, 4", "unpadded"), ("plain", "unpadded")),
        over(speeds, ("medusa, 4", "unpadded"), ("plain", "unpadded")),
        strict=False,
    )
    return sampled([100 * (a - b) for a, b in pairs], "{:+.1f} points")


def clover_by_batch(size: str, method: str, evidence: Evidence) -> Measured | None:
    speeds = {b: evidence.speeds(f"clover/{size}_b{b:02d}") for b in (4, 8, 16, 24, 32, 48)}
    return medians({f"batch {b}": over(s, (method, "unpadded"), ("plain", "unpadded")) for b, s in speeds.items()})


def logarithmic(evidence: Evidence) -> Measured | None:
    """R² of tokens a step as a logarithm of the tokens verified."""
    cells = {f"verified-{m}": evidence.record(f"benchmarks/verified-{m}") or {} for m in ("medusa",)}
    found = sorted((n, e) for (t, _, n), e in verified(cells).items() if t == 0.0)
    fits = fitted([n for n, _ in found], [e for _, e in found]) if len(found) > 2 else {}
    return sampled([fits["logarithmic"].r_squared]) if "logarithmic" in fits else None


TYPICAL_COMMAND = (
    "echelon generate MODEL --speculative-config.method medusa --speculative-config.model HEAD --speculative-config.acceptance typical"
)
LEARNED = "60 thousand conversations (5 hours on an A100)"
MEDUSA = [
    Claim(
        "medusa-speed",
        "Heads on a frozen target (Medusa-1) are 2.18 times as fast as plain decoding at batch 1.",
        "2.18 (Vicuna-7B, MT-Bench, 64 nodes; ours at most 12)",
        HEADS_COMMAND,
        AtLeast(2.18),
        partial(speed_up, "medusa, tree", 1),
        why=partial(few_and_dear, "medusa", LEARNED, "benchmarks/heads-01", "medusa, tree", 2.18),
    ),
    Claim(
        "medusa-2",
        "Heads trained together with their target (Medusa-2) are 2.83 times as fast.",
        "2.83 (Vicuna-7B)",
        "echelon train MODEL --method medusa --output HEAD",
        AtLeast(2.83),
        lambda _: None,
        needs="training the target itself, which changes its text; heads here leave it as it is",
    ),
    Claim(
        "medusa-tree",
        "Medusa's tree is 1.27 times as fast as a chain of its heads.",
        "1.27: speed-ups of 1.9 and 1.5",
        HEADS_COMMAND,
        AtLeast(1.27),
        partial(tree_over_chain, "medusa", True),
        why=partial(tree_and_chain, "medusa", LEARNED),
    ),
    Claim(
        "medusa-tree-tokens",
        "Medusa's tree emits more tokens a step than a chain of its heads.",
        "1.27 in speed, at an overhead above 1",
        HEADS_COMMAND,
        AtLeast(1.27),
        partial(tree_over_chain, "medusa", False),
        why=partial(few_batches, "medusa", LEARNED),
    ),
    Claim(
        "medusa-head-1",
        "The likeliest token of Medusa's first head is right in 56 % of the positions.",
        "0.560 (7 B, first release)",
        "python -m benchmarks.plateau",
        AtLeast(0.56, "{:.3f}"),
        partial(top1, "medusa", 1),
        why=partial(few_batches, "medusa", LEARNED),
    ),
    Claim(
        "medusa-head-5",
        "The likeliest token of Medusa's fifth head is right in 12 % of the positions.",
        "0.118",
        "python -m benchmarks.plateau",
        AtLeast(0.118, "{:.3f}"),
        partial(top1, "medusa", 5),
        why=partial(few_batches, "medusa", LEARNED),
    ),
    Claim(
        "medusa-log",
        "Tokens a step grow with the logarithm of the number of drafted tokens (Medusa).",
        "0.477 · log n (figure); R² is ours",
        f"{VERIFIED_COMMAND}-medusa",
        AtLeast(0.9),
        logarithmic,
    ),
    Claim(
        "medusa-crosses",
        "Medusa's tree of fixed size gains at batch 1 and loses to plain decoding at large batches.",
        "the modelled gain is gone beyond batch 32",
        HEADS_COMMAND,
        Crosses(),
        partial(by_batch, "medusa, tree"),
        is_merit=False,
    ),
    Claim(
        "medusa-typical",
        "Typical acceptance is faster and leaves the quality of answers as it is.",
        "6.18 against 6.17 points of MT-Bench",
        TYPICAL_COMMAND,
        AtLeast(0.0),
        lambda _: None,
        needs="a judge of answers (GPT-4)",
    ),
    *spec_bench_rows("medusa", 1.71, 2.31),
]
CLOVER_COMMAND = "python -m benchmarks.clover {}_b{:02d}"
CLOVER_SPEEDS = (("small", 4, 1.91), ("large", 4, 2.46), ("small", 16, 1.57), ("large", 16, 1.81), ("large", 48, 1.36))
CLOVER = [
    Claim(
        "clover-tokens",
        "Beyond the one token of plain decoding, Clover emits 50 to 76 % more tokens a step than Medusa, both with trees of 4 tokens.",
        "+50 to +76 %",
        ABLATION_COMMAND.format("clover"),
        AtLeast(50.0, "{:+.0f} %"),
        extra_tokens,
        why=little_text,
    ),
    Claim(
        "clover-ladder",
        "Each block of Clover brings tokens a step: Augmenting Block, Regressive Connection, Attention Decoder, added in turn.",
        "each does (ablation)",
        ABLATION_COMMAND.format("clover"),
        Ordered(),
        ladder,
        why=little_text,
    ),
    Claim(
        "clover-gap",
        "Clover's blocks raise the accuracy of later heads more than that of earlier ones.",
        "11.7, 21.7 and 26.4 points of top-5",
        ABLATION_COMMAND.format("clover"),
        Ordered(),
        points_by_head,
        why=little_text,
    ),
    *(
        Claim(
            f"clover-head-{head}",
            f"Clover's blocks together raise the top-5 accuracy of head {head} by {published} points.",
            f"{published} (Baichuan, small model)",
            ABLATION_COMMAND.format("clover"),
            AtLeast(published, "{:.1f}"),
            partial(points, head),
            why=little_text,
        )
        for head, published in ((1, 11.7), (2, 21.7), (3, 26.4))
    ),
    *(
        Claim(
            f"clover-{size}-{batch}",
            f"On the {size} model Clover is {published} times as fast as plain decoding at batch {batch}, with trees of 4.",
            f"{published} (mathematics, Baichuan, A800)",
            CLOVER_COMMAND.format(size, batch),
            AtLeast(published),
            partial(clover, size, batch, "plain"),
            why=partial(few_and_dear, "clover", "150 million tokens", f"clover/{size}_b{batch:02d}", "clover, 4", published),
        )
        for size, batch, published in CLOVER_SPEEDS
    ),
    *(
        Claim(
            f"clover-over-medusa-{size}",
            f"On the {size} model Clover's speed-up over plain decoding is up to {published} points above Medusa's.",
            f"+{published} points at batch 4, on the {size} model",
            CLOVER_COMMAND.format(size, 4),
            AtLeast(float(published), "{:+.1f} points"),
            partial(clover, size, 4, "medusa"),
            why=partial(few_batches, "clover", "150 million tokens"),
        )
        for size, published in (("small", 37), ("large", 57))
    ),
    Claim(
        "clover-falls",
        "The speed-up of Clover's tree of 4 falls as the batch grows; at batch 48 the small model loses to plain decoding.",
        "1.91 at batch 4, 0.79 at 48",
        "python -m benchmarks.clover small",
        Crosses(falls=True),
        partial(clover_by_batch, "small", "clover, 4"),
        is_merit=False,
    ),
]
