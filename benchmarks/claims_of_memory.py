"""What SpecMemo (Yildirim and Chen 2025) claims of memory, and what was measured of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.claims_of_heads import LEARNED, few_batches
from benchmarks.hard_limits import RATIOS, drafting_gains
from benchmarks.reasons import NOT_KEPT, dear_steps, step_ms
from benchmarks.verdicts import AtLeast, AtMost, Claim, Evidence, Measured, Within, labelled, over, sampled

PLANNED_COMMAND = "python -m benchmarks.specmemo planned"
MEDUSA_COMMAND = "python -m benchmarks.specmemo --method medusa --questions FILE"
MEMORY_COMMAND = "python -m benchmarks.memory {}"
TREES_COMMAND = "python -m benchmarks.alike trees_{}_b{:02d}"
LEAF_LOGITS = "logits gathered by leaf"


def planned(evidence: Evidence, which: str) -> dict[str, Any]:
    return evidence.record(f"specmemo/planned_{which}") or {}


def tree_share(which: str, evidence: Evidence) -> Measured | None:
    stock, own = planned(evidence, which).get("tree", (0, 0))
    return sampled([own / stock], note=f"{own / 1e6:.2f} of {stock / 1e6:.2f} MB a row") if stock else None


def kept(which: str, other: str, evidence: Evidence) -> Measured | None:
    return sampled(over(planned(evidence, which).get("speeds", {}), "planned", other))


def gathered(evidence: Evidence) -> Measured | None:
    """Megabytes of logits that Medusa's own layout gathers by leaf, of its stock tree."""
    record = evidence.record("memory/trees")
    return sampled([record["Medusa stock"][LEAF_LOGITS] / 1e6], "{:.1f} MB", "counted") if record else None


def all_buffers(evidence: Evidence) -> Measured | None:
    record = evidence.record("memory/trees")
    if not record:
        return None
    return sampled([sum(record["Medusa planned"].values()) / sum(record["Medusa stock"].values())], note="all buffers of a tree, counted")


def our_buffers(evidence: Evidence) -> Measured | None:
    """Bytes of a tree of 44 nodes over those of 64, in our layout, which gathers nothing."""
    record = evidence.record("memory/trees")
    if not record:
        return None
    own, stock = (sum(record[f"ours {which}"].values()) / 1e6 for which in ("planned", "stock"))
    medusa = sum(record["Medusa stock"].values()) / 1e6
    return sampled([own / stock], note=f"{own:.1f} of {stock:.1f} MB a query, where Medusa's layout takes {medusa:.1f}")


def fastest_shape(evidence: Evidence) -> Measured | None:
    """The fastest shape's share of the most paths and of the most nodes that were tried."""
    shapes = (evidence.record("specmemo/grid_eagle") or {}).get("shapes", [])
    if not shapes:
        return None
    best = max(shapes, key=lambda s: s["speed"])
    shares = {name: best[name] / max(s[name] for s in shapes) for name in ("heads", "nodes")}
    return labelled({f"{best[name]} {name}": share for name, share in shares.items()})


def within_bound(evidence: Evidence) -> Measured | None:
    """Speed at the lower bound over plain decoding; nothing where less memory did too."""
    record = evidence.record("memory/bound")
    if not record or "died" not in record["below"]:
        return None
    last, below = record["rounds"][-1]["draft_model"], record["below"]["limit"]
    planned, limit, below = (value / 2**20 for value in (last["least"], last["limit"], below))
    note = (
        f"of {planned:,.0f} MiB that the plan says it needs, {limit:,.0f} are data; under a hard limit of so much data it runs, under "
        f"{below:,.0f} MiB it dies"
    )
    return sampled(drafting_gains(record), note=note)


def queries(evidence: Evidence) -> Measured | None:
    """Queries that fit, and those that were planned, the fewer over the more: by plan, and at ratios of weights to keys. Of a ratio that
    the plan does not hold for possible, the plan's own choice is what was planned, if it ran; where it died, the plan was right.
    """
    records = {ratio: evidence.record(f"memory/ratio_llama_{ratio}") for ratio in (*RATIOS, "plan")}
    own, found = records["plan"], dict[str, float | None]()
    for ratio, record in records.items():
        if record is not None:
            fit = record["held"] + record.get("holds_one_more", False)
            planned = record["planned"] or (own["planned"] if own and fit else 0)
            found["plan" if ratio == "plan" else f"1:{ratio}"] = min(fit, planned) / max(fit, planned) if fit or planned else 1.0
    refused = [f"1:{ratio}" for ratio, record in records.items() if record and ratio != "plan" and not record["planned"] and record["held"]]
    note = f"for {', '.join(refused)} the plan sees no room, and as many as it allows by its own choice ran" if refused else ""
    return labelled(found, "{:.3f}", note=note)


def one_more(evidence: Evidence) -> str:
    """By how much a plan is a bound."""
    found = [evidence.record(f"memory/ratio_llama_{ratio}") or {} for ratio in (*RATIOS, "plan")]
    ran = [r["held"] + r.get("holds_one_more", False) - r["planned"] for r in found if r.get("planned")]
    if min(ran, default=0) < 0:
        return f"of queries that a plan allows {-min(ran)} did not fit: the plan is no bound"
    more = max(ran, default=0)
    return f"a plan is a bound, by blocks that each row may take: {more} more query fits than it says, of so few that it counts in per cent"


def padded_trees(batch: int, evidence: Evidence) -> Measured | None:
    return sampled(over(evidence.speeds(f"alike/trees_eagle_b{batch:02d}"), ("tree", "padded"), ("plain", "unpadded")))


def unpadded_trees(head: str, evidence: Evidence) -> Measured | None:
    return sampled(over(evidence.speeds(f"alike/trees_{head}_b08"), ("tree", "unpadded"), ("tree", "padded")))


def little_to_pad(head: str, evidence: Evidence) -> str:
    """How much of what padding computes is padding."""
    padded = [r for r in evidence.results(f"alike/trees_{head}_b08") if (r.method, r.strategy) == ("tree", "padded")]
    inputs, keys = (max((getattr(r, share) for r in padded), default=0.0) for share in ("padded_input_share", "padded_kv_share"))
    return (
        f"{inputs:.0%} of the inputs and {keys:.0%} of the keys of padded rows are padding, which costs no more than laying rows end to end"
    )


def trees_by_batch(evidence: Evidence) -> Measured | None:
    """Throughput of padded trees at batch 8 over that at batch 1."""
    found = ({(r.method, r.strategy): r for r in evidence.results(f"alike/trees_eagle_b{b:02d}")} for b in (8, 1))
    many, one = (results.get(("tree", "padded")) for results in found)
    if many is None or one is None:
        return None
    pairs = zip(many.decode_tokens_per_second, one.decode_tokens_per_second, strict=False)
    rows = [(evidence.record(f"alike/trees_eagle_b{b:02d}") or {})["rows"] for b in (8, 1)]
    return sampled([a / b for a, b in pairs], note=f"{rows[0]} and {rows[1]} prompts")


def steps_of_trees(evidence: Evidence) -> str:
    """What a step of padded trees takes at batch 8 and at batch 1."""
    found = ({(r.method, r.strategy): r for r in evidence.results(f"alike/trees_eagle_b{b:02d}") if r.step_ms} for b in (8, 1))
    many, one = (results.get(("tree", "padded")) for results in found)
    return f"a step of 8 rows takes {step_ms(many):.0f} ms and one of a single row {step_ms(one):.0f} ms" if many and one else NOT_KEPT


EIGHT = (
    "eight devices and a model of 70 B; no cell of `scripts/gpu_check.sh` decides it; "
    "[on paper](on_paper.md#specmemos-eight-stages) it is computed"
)
SPECMEMO = [
    Claim(
        "specmemo-tree",
        "A tree that is planned for the memory takes 65 % less of it than Medusa's stock tree.",
        "19.5 of 55 MB a query: 0.355 (Vicuna-7B, Medusa)",
        PLANNED_COMMAND,
        AtMost(0.355, "{:.3f}"),
        partial(tree_share, "eagle"),
    ),
    Claim(
        "specmemo-kept",
        "The planned tree keeps 96 % of the stock tree's throughput.",
        "0.96 (Titan RTX, MT-Bench)",
        PLANNED_COMMAND,
        AtLeast(0.96),
        partial(kept, "eagle", "stock"),
    ),
    Claim(
        "specmemo-gains",
        "The planned tree is still faster than plain decoding.",
        "retaining the speed-up (abstract)",
        PLANNED_COMMAND,
        AtLeast(1.0),
        partial(kept, "eagle", "plain"),
    ),
    Claim(
        "specmemo-tree-medusa",
        "With Medusa's heads, on MT-Bench, a tree that is planned for the memory takes 65 % less of it than the stock tree.",
        "19.5 of 55 MB a query: 0.355 (Vicuna-7B, Medusa)",
        MEDUSA_COMMAND,
        AtMost(0.355, "{:.3f}"),
        partial(tree_share, "medusa_mt_bench"),
    ),
    Claim(
        "specmemo-kept-medusa",
        "With Medusa's heads, on MT-Bench, the planned tree keeps 96 % of the stock tree's throughput.",
        "0.96 (Titan RTX, MT-Bench)",
        MEDUSA_COMMAND,
        AtLeast(0.96),
        partial(kept, "medusa_mt_bench", "stock"),
    ),
    Claim(
        "specmemo-gains-medusa",
        "With Medusa's heads, on MT-Bench, the planned tree is still faster than plain decoding.",
        "retaining the speed-up (abstract)",
        MEDUSA_COMMAND,
        AtLeast(1.0),
        partial(kept, "medusa_mt_bench", "plain"),
        why=partial(few_batches, "medusa", LEARNED),
    ),
    Claim(
        "specmemo-shape",
        "The fastest tree has neither the most heads (levels) nor the most nodes.",
        "3 of 5 heads, 44 of 64 nodes",
        "python -m benchmarks.specmemo grid",
        AtMost(0.99),
        fastest_shape,
    ),
    Claim(
        "specmemo-bound",
        "There is a least memory in which speculation runs and gains; below it nothing runs.",
        "a lower bound, from a model of memory",
        MEMORY_COMMAND.format("bound"),
        AtLeast(1.0),
        within_bound,
    ),
    Claim(
        "specmemo-55",
        "Medusa's stock tree takes 55 MB a query.",
        "55 MB; the paper does not say of how many heads, and Medusa has 5 by default",
        MEMORY_COMMAND.format("trees"),
        Within(54.0, 56.0, "{:.1f} MB"),
        gathered,
        is_merit=False,
    ),
    Claim(
        "specmemo-all",
        "All buffers of a tree together shrink by 65 % from the stock tree to the planned one, in Medusa's layout.",
        "0.355; the paper does not say of which tensors",
        MEMORY_COMMAND.format("trees"),
        AtMost(0.355, "{:.3f}"),
        all_buffers,
        is_merit=False,
    ),
    Claim(
        "specmemo-ours",
        "They shrink in this engine's layout too, by less, as it copies no logits for each leaf.",
        "no figure",
        MEMORY_COMMAND.format("trees"),
        AtMost(1.0, "{:.3f}"),
        our_buffers,
        is_merit=False,
    ),
    Claim(
        "specmemo-queries",
        "Under a hard limit as many queries fit as the plan says: by its own choice, and at fixed shares of the weights' bytes.",
        "only in figures that cannot be read off; here within 1 %",
        MEMORY_COMMAND.format("ratio"),
        AtLeast(0.99, "{:.3f}"),
        queries,
        why=one_more,
    ),
    Claim(
        "specmemo-70b",
        "Padded batches of trees on eight devices have 8 times the throughput at batch 10 that they have at batch 1.",
        "46.0 against 5.7 tokens/s (Llama-2-70B, 8 × MI250)",
        "python -m benchmarks.on_paper stages",
        AtLeast(8.0),
        lambda _: None,
        needs=EIGHT,
    ),
    Claim(
        "specmemo-batch",
        "Padded batches of trees have 7.3 times the throughput at batch 8 that they have at batch 1.",
        "41.6 against 5.7 tokens/s: 7.3",
        f"{TREES_COMMAND.format('eagle', 1)} trees_eagle_b08",
        AtLeast(7.3),
        trees_by_batch,
        why=steps_of_trees,
    ),
    Claim(
        "specmemo-batch-4",
        "Padded trees are twice as fast as plain decoding in a batch of 4.",
        "28.8 against 14.2 tokens/s: 2.03; 1.54 at batch 10",
        TREES_COMMAND.format("eagle", 4),
        AtLeast(2.03),
        partial(padded_trees, 4),
        why=partial(dear_steps, "alike/trees_eagle_b04", "tree", 2.03, strategy="padded"),
    ),
    *(
        Claim(
            f"specmemo-unpadded-{head}",
            f"Unpadded trees of {name} are no slower than padded ones in a batch of 8 (the paper names padding as what it wastes).",
            "no figure: 1.00 at least",
            TREES_COMMAND.format(head, 8),
            AtLeast(1.0),
            partial(unpadded_trees, head),
            why=partial(little_to_pad, head),
        )
        for head, name in (("eagle", "EAGLE"), ("medusa", "Medusa"), ("clover", "Clover"))
    ),
]
