"""What EQSPEC and EXSPEC (Zhang et al. 2025) claim of batches that change no text, and what was measured of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.reasons import NOT_KEPT, step_ms
from benchmarks.verdicts import AtLeast, AtMost, Claim, Evidence, Measured, Ordered, Within, labelled, over, sampled
from benchmarks.workloads import num_realigned
from echelon.bench.throughput import ThroughputResult

FAULTS = {  # re-enacted fault → who has it, share of equal rows that its system has at batch 4, in per cent
    "bonus token from the draft": ("DSD", "0.0 to 0.2 %"),
    "rejected KV kept with automatic positions": ("BSP", "0.2 to 2.1 %"),
    "KV unaligned across rows": ("DSD and BSP", "0.0 to 2.1 %"),
    "position drift": ("BSP", "0.2 to 2.1 %"),
}


def equal_rows(strategy: str, drafter: str, batches: tuple[int, ...], evidence: Evidence) -> Measured | None:
    """Rows with the text of plain decoding alone, in per cent, by batch; of Spec-Bench where that was measured."""

    def by_size(rows: list[dict[str, Any]], what: str) -> Measured | None:
        shares = {f"batch {r['batch_size']}": 100 * r["num_exact"] / r["num_rows"] for r in rows}
        return labelled(dict(shares), "{:.1f} %", 1, f"{rows[0]['num_rows']} prompts of {what}") if rows else None

    record = evidence.record(f"equivalence/{strategy}")
    if record:
        return by_size([r for r in record["results"] if r["batch_size"] in batches], "Spec-Bench")
    found = (evidence.record("benchmarks/equality") or {}).get("equality", [])
    names = {"none": "plain"}  # as older records call it
    own = [r for r in found if (r["strategy"], names.get(r["drafter"], r["drafter"])) == (strategy, drafter) and r["batch_size"] in batches]
    return by_size(own, "source")


def faulty_rows(fault: str, evidence: Evidence) -> Measured | None:
    """Equal rows with a fault re-enacted, where rows run together: some faults need two."""
    record = evidence.record(f"equivalence/{fault.replace(' ', '_')}")
    if not record:
        return None
    together = [r for r in record["results"] if r["batch_size"] > 1]
    sizes = ", ".join(str(r["batch_size"]) for r in together)
    note = f"{record['results'][0]['num_rows']} prompts of Spec-Bench at batch {sizes}"
    return sampled([100 * r["num_exact"] / r["num_rows"] for r in together], "{:.1f} %", note)


def realigned(batch: int, lengths: str, evidence: Evidence) -> dict[str, ThroughputResult]:
    """Results of the realigning strategies by name."""
    found = evidence.results(f"benchmarks/realign-{lengths}-{batch:02d}")
    return {r.strategy: r for r in found if r.method == "draft model"}


def shift_share(result: ThroughputResult | None) -> float | None:
    """Of a step, what choosing slots and shifting keys takes, in per cent."""
    return 100 * result.step_ms["layout"] / sum(result.step_ms.values()) if result is not None else None


BATCHES = (1, 2, 4, 8, 16, 32)


def overhead(evidence: Evidence) -> Measured | None:
    shares = {f"batch {b}": shift_share(realigned(b, "random", evidence).get("realign")) for b in BATCHES}
    return labelled(
        shares,
        "{:.1f} %",
        1,
        "here keys are moved by one gather for each tensor; the paper's code copies row by row and waits for the device 4 times for each "
        "row and layer",
    )


def largest_overhead(evidence: Evidence) -> Measured | None:
    found = overhead(evidence)
    return Measured([max(found.samples)], found.form, note=found.note) if found else None


def scaling(strategy: str, evidence: Evidence) -> Measured | None:
    one, many = (realigned(b, "random", evidence).get(strategy) for b in (1, 8))
    if one is None or many is None:
        return None
    pairs = zip(many.decode_tokens_per_second, one.decode_tokens_per_second, strict=False)
    return sampled(
        [a / b for a, b in pairs if b], note=f"{num_realigned(8)} prompts at batch 8, and the first {num_realigned(1)} of them at batch 1"
    )


def steps_by_batch(evidence: Evidence) -> str:
    """What a step takes at both batches."""
    many, one = (realigned(b, "random", evidence).get("unpadded") for b in (8, 1))
    if many is None or one is None:
        return NOT_KEPT
    return f"a step of 8 rows with drafts takes {step_ms(many):.0f} ms and one of a single row {step_ms(one):.0f} ms"


def grouped_over_realigned(batch: int, lengths: str, evidence: Evidence) -> Measured | None:
    """EXSPEC over EQSPEC, with what decides between them."""
    found = realigned(batch, lengths, evidence)
    one, other = found.get("same-length"), found.get("realign")
    if one is None or other is None:
        return None
    note = (
        f"{one.decode_median:.0f} against {other.decode_median:.0f} tokens/s; groups were found in {one.group_rate or 0:.0%} of the steps"
    )
    pairs = zip(one.decode_tokens_per_second, other.decode_tokens_per_second, strict=False)
    note += "; in all others rows are padded and also copied together, and more rows are kept in memory"
    return sampled([a / b for a, b in pairs if b], note=note)


def group_rate(batch: int, lengths: str, evidence: Evidence) -> Measured | None:
    found = realigned(batch, lengths, evidence).get("same-length")
    return sampled([100 * found.group_rate], "{:.1f} %") if found is not None and found.group_rate is not None else None


def by_window(evidence: Evidence) -> Measured | None:
    record = evidence.record("alike/windows_b08")
    rates = {f"{w} rows": 100 * rate for w, rate, _ in record["windows"]} if record else {}
    return labelled(dict(rates), "{:.1f} %")


def tail(batch: int, evidence: Evidence) -> Measured | None:
    found: dict[str, list[float]] = {}
    for r in (evidence.record(f"benchmarks/latency-{batch:02d}") or {}).get("latencies", []):
        found.setdefault(r["strategy"], []).append(r["p99"])
    return sampled(over(found, "same-length", "realign"))


EQUALITY = "python -m benchmarks.equivalence --questions question.jsonl"
TABLES = "python -m benchmarks.tables {}"
EQSPEC = [
    Claim(
        "equal-1",
        "Speculation at batch 1 gives 97.3, 94.6 and 96.7 % of the texts of plain decoding; the others are put down to rounding.",
        "97.3 % at most (Vicuna, Qwen3, GLM-4; 480 prompts × 50 tokens, float16)",
        f"{EQUALITY} unpadded",
        AtLeast(97.3, "{:.1f} %"),
        partial(equal_rows, "unpadded", "draft_model", (1,)),
    ),
    Claim(
        "equal-4",
        "Correct speculation in a batch of 4 gives 92.1, 92.3 and 96.5 % of the texts of plain decoding (EXSPEC 90.8, 95.0 and 95.2 %).",
        "96.5 % at most",
        f"{EQUALITY} unpadded",
        AtLeast(96.5, "{:.1f} %"),
        partial(equal_rows, "unpadded", "draft_model", (4, 8, 16)),
    ),
    Claim(
        "equal-realigned",
        "EQSPEC re-enacted on PyTorch's attention, whose rounding changes with the batch, gives as many equal texts as EQSPEC reports.",
        "90.8 to 97.3 %",
        f"{EQUALITY} realign",
        Within(90.8, 97.3, "{:.1f} %"),
        partial(equal_rows, "realign", "draft_model", (1, 2, 4, 8, 16)),
        is_merit=False,
    ),
    Claim(
        "equal-framework",
        "Batching alone changes texts in `transformers`: plain batches of 4 give 53.8, 92.9 and 93.3 % of the texts of batch 1.",
        "53.8 to 93.3 %",
        "python -m benchmarks.tables equality",
        Within(53.8, 93.3, "{:.1f} %"),
        partial(equal_rows, "transformers", "plain", (4,)),
        is_merit=False,
    ),
    *(
        Claim(
            f"fault-{fault.split()[0].lower()}-{fault.split()[-1].lower()}",
            f"With a fault that the paper finds in {who} ({fault}) hardly any text is that of plain decoding.",
            f"{published} (with all faults of that system)",
            f"{EQUALITY} '{fault.replace(' ', '_')}'",
            AtMost(10.0, "{:.1f} %"),
            partial(faulty_rows, fault),
            is_merit=False,
        )
        for fault, (who, published) in FAULTS.items()
    ),
    Claim(
        "overhead-grows",
        "The larger the batch, the greater the share of a step that moving keys into line takes (EQSPEC).",
        "13 % at batch 1, 27.7 % at 4, 38 to 40 % at 32",
        TABLES.format("realign"),
        Ordered(),
        overhead,
        is_merit=False,
    ),
    Claim(
        "overhead-40",
        "Moving keys into line takes up to 40 % of a step (EQSPEC).",
        "38 to 40 % at batch 32",
        TABLES.format("realign"),
        AtLeast(38.0, "{:.1f} %"),
        largest_overhead,
        is_merit=False,
    ),
    Claim(
        "scaling",
        "Batch 8 brings up to 3 times the throughput of batch 1, at equal text; this engine.",
        "3 (EXSPEC over itself at batch 1)",
        TABLES.format("realign"),
        AtLeast(3.0),
        partial(scaling, "unpadded"),
        why=steps_by_batch,
    ),
    Claim(
        "scaling-theirs",
        "Batch 8 brings up to 3 times the throughput of batch 1; EXSPEC re-enacted.",
        "3",
        TABLES.format("realign"),
        AtLeast(3.0),
        partial(scaling, "same-length"),
        is_merit=False,
    ),
    Claim(
        "grouping-4",
        "Running rows of equal length together (EXSPEC) is 1.64 times as fast as moving keys into line (EQSPEC), in a batch of 4.",
        "156.4 against 95.6 tokens/s at batch 4: 1.64; their own log shows groups in 4.2 % of the steps, and refilling in the other 96 %",
        TABLES.format("realign"),
        AtLeast(1.64),
        partial(grouped_over_realigned, 4, "random"),
        is_merit=False,
    ),
    Claim(
        "grouping-8-equal",
        "EXSPEC is faster than EQSPEC where all prompts have the same length, which is where grouping should work best.",
        "faster than EQSPEC (figure)",
        TABLES.format("realign"),
        AtLeast(1.0),
        partial(grouped_over_realigned, 8, "equal"),
        is_merit=False,
    ),
    Claim(
        "groups-random",
        "Among prompts of random lengths EXSPEC hardly ever finds rows of equal length at batch 8.",
        "4.8 % at batch 8, 23.6 % at 2 (Multi30k, window 50; ours of 24 rows)",
        TABLES.format("realign"),
        AtMost(4.8, "{:.1f} %"),
        partial(group_rate, 8, "random"),
        is_merit=False,
    ),
    Claim(
        "groups-equal",
        "Among prompts of equal length EXSPEC finds rows of equal length in most steps.",
        "84.1 % at batch 8, 95.9 % at 2 (window 50; ours of 24 rows)",
        TABLES.format("realign"),
        AtLeast(84.1, "{:.1f} %"),
        partial(group_rate, 8, "equal"),
        is_merit=False,
    ),
    Claim(
        "groups-by-window",
        "The more rows EXSPEC keeps to choose from (its window), the more often it finds rows of equal length.",
        "no figure (their window is of 50 rows)",
        "python -m benchmarks.alike windows",
        Ordered(),
        by_window,
        is_merit=False,
    ),
    Claim(
        "tail-8",
        "Waiting for rows of equal length makes the slowest answers (P99) of EXSPEC slower than EQSPEC's.",
        "P99 33.9 against 22.5 s at batch 8: 1.51",
        "python -m benchmarks.tables latency",
        AtLeast(1.51),
        partial(tail, 8),
        is_merit=False,
    ),
]
