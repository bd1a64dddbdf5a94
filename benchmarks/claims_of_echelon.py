"""What this project promises of itself, drafters of Spec-Bench without a head, and what was measured of both."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from statistics import median

from benchmarks.cells import Record, Records
from benchmarks.claims_of_equality import EQUALITY, equal_rows
from benchmarks.claims_of_heads import spec_bench_rows
from benchmarks.claims_of_padding import DEVICE
from benchmarks.document import groups
from benchmarks.long_outputs import HOW
from benchmarks.reasons import longer_steps, of_results
from benchmarks.verdicts import AtLeast, AtMost, Claim, Crosses, Evidence, Measured, labelled, medians, over, sampled
from echelon.bench.throughput import ThroughputResult

LEAST_MINUTES = 30  # of a soak whose memory has a slope
PEERS = {  # (processor, quantisation, batch) → record of `echelon bench peers`
    ("Zen 4", "int8", 1): "int8",
    ("Zen 4", "int8", 8): "int8_b8",
    ("Zen 4", "int8", 16): "int8_b16",
    ("Zen 4", "int4", 1): "int4",
    ("Zen 4", "int4", 8): "int4",
    ("Zen 4", "int4", 16): "int4_b16",
    ("AMX", "int8", 1): "int8_amx",
    ("AMX", "int8", 8): "int8_amx",
    ("AMX", "int4", 1): "int4_amx",
    ("AMX", "int4", 8): "int4_amx",
}
PROCESSORS = {"Zen 4": "a Zen 4", "AMX": "an Intel processor with AMX"}
AHEAD = {1: 1.0, 8: 1.5, 16: 1.5}  # of the best of others


def whole(name: str, evidence: Evidence) -> Measured | None:
    """Equal rows of a run, in per cent."""
    record = evidence.record(name)
    return sampled([100 * record["num_exact"] / record["num_rows"]], "{:.2f} %", f"{record['num_rows']:,} rows") if record else None


def long_speed(evidence: Evidence) -> Measured | None:
    """Over plain decoding, by quarter of a long text; nothing where one of the batches has not been measured so."""
    found, notes = dict[str, float | None](), list[str]()
    for batch in (1, 8):
        record = evidence.record(f"long/b{batch:02d}")
        if record is None or not record.get("settings", {}).items() >= HOW.items():
            return None
        for i, (a, b) in enumerate(zip(record["speed"], record["plain"], strict=True)):
            found[f"batch {batch}, quarter {i + 1}"] = a / b
        notes.append(f"until the first of {batch} rows ends, when rows have {record['tokens_a_row']:,.0f} tokens" if batch > 1 else "")
    return labelled(found, note="".join(notes))


def long_steps(evidence: Evidence) -> str:
    """What steps with drafts emit and take in the quarter that gains least."""
    records = [record for batch in (1, 8) if (record := evidence.record(f"long/b{batch:02d}"))]
    quarters = [(s / p, e) for r in records for s, p, e in zip(r["speed"], r["plain"], r["tokens_per_step"], strict=True)]
    gain, emitted = min(quarters, default=(1.0, 1.0))
    return longer_steps(emitted, gain)


def _long_parts(evidence: Evidence) -> list[Record]:
    """The parts of the soak that are long enough for a slope."""
    return [p for p in (evidence.record("soak") or {}).values() if p["minutes"] >= LEAST_MINUTES]


def soaked(key: str, form: str, evidence: Evidence) -> Measured | None:
    """Of all long parts of the soak: together what was wrong, also in short ones, and of each how fast memory grew."""
    own = _long_parts(evidence)
    if key == "violations":
        own += [p for p in (evidence.record("soak") or {}).values() if p["violations"] and p not in own]
    if not own:
        return None
    minutes, requests = (" and ".join(f"{p[k]:,.0f}" for p in own) for k in ("minutes", "requests"))
    note = f"runs of {minutes} minutes, {requests} requests"
    if key == "mib_an_hour":
        return labelled({f"run {i}": p[key] for i, p in enumerate(own, 1)}, form, 1, note)
    return sampled([sum(p[key] for p in own)], form, note)


def grown_by_half(evidence: Evidence) -> str:
    """When resident memory grew in the part of the soak in which it grew most, and how what is allocated did."""
    part: Record = max(_long_parts(evidence), key=lambda p: float(p["mib_an_hour"]), default={})
    if not part.get("memory"):
        return "how memory grew was not kept"
    sizes = [resident for _, resident, _ in part["memory"]]
    early, late = sizes[len(sizes) // 2] - sizes[0], sizes[-1] - sizes[len(sizes) // 2]
    warming = "; most is warming up, and a longer run would tell whether the rest ends" if late < early / 2 else ""
    return (
        f"in the run of {part['minutes']:.0f} minutes resident memory grew by {early:.1f} MiB in the first half and by {late:.1f} in the "
        f"second, {late / part['minutes'] * 120:.1f} an hour; what is allocated, by {part['allocated_mib_an_hour']:.1f} an hour{warming}"
    )


def same_drafts(evidence: Evidence) -> Measured | None:
    record = evidence.record("eagle3_in_vllm")
    return (
        sampled([record["num_equal"] / record["num_drafts"]["after the same text"]], note=f"{record['num_equal']} drafts")
        if record
        else None
    )


def falls_with_batch(evidence: Evidence) -> Measured | None:
    """LLMA with fixed lengths over plain decoding, by batch."""
    speeds = {b: evidence.speeds(f"benchmarks/gain-{b:02d}") for b in (1, 8, 16)}
    return medians({f"batch {b}": over(s, ("LLMA", "unpadded"), ("plain", "unpadded")) for b, s in speeds.items()})


def beside_peers(name: str, batch: int, evidence: Evidence) -> Measured | None:
    """Our best "auto" over the best mode of any other engine, decoding: both those of the highest medians, round by round."""
    record = evidence.record(f"peers/{name}")
    ours = _fastest([r for r in record["ours"] if r["method"].endswith(" auto")], batch) if record else None
    others = _fastest([p["result"] for p in record["peers"]], batch) if record else None
    if not ours or not others:
        return None
    speeds = {r["method"]: r["decode_tokens_per_second"] for r in (ours, others)}
    note = ", ".join(f"{method} {median(own):.0f} tokens/s" for method, own in speeds.items())
    return sampled(over(speeds, *speeds), note=note)


def _fastest(results: SequenceOf[Record], batch: int) -> Record | None:
    return max((r for r in results if r["batch_size"] == batch), key=lambda r: median(r["decode_tokens_per_second"]), default=None)


def beside_plain(name: str, batch: int, evidence: Evidence) -> str:
    """What drafting still brings where plain decoding is compared too."""
    record = evidence.record(f"peers/{name}") or {"ours": []}
    found = [ThroughputResult(**{k: v for k, v in r.items() if k != "median"}) for r in record["ours"] if r["batch_size"] == batch]
    why = of_results(found, "draft model auto", 0.0)
    counts = next((r.adaptive for r in found if r.method == "draft model auto" and r.adaptive), None)
    running = counts["num_row_steps"] / counts["num_steps"] if counts else batch
    return f"{why}; {running:.1f} of {batch} rows were running on average, as texts end apart" if running < 0.9 * batch else why


def fastest_unpadded(evidence: Evidence) -> Measured | None:
    """Of all comparisons at batch 2 and more, those in which `unpadded` is the fastest strategy, in per cent."""
    cells = {name: record for name in Records(evidence.folder / "benchmarks").read() if (record := evidence.record(f"benchmarks/{name}"))}
    compared = [found for *_, batch, found in groups(cells) if batch > 1 and len(found) > 1 and "unpadded" in found]
    best = [max(found.values(), key=lambda r: r.decode_median) is found["unpadded"] for found in compared]
    return sampled([100 * sum(best) / len(best)], "{:.0f} %", f"{len(best)} comparisons") if best else None


def equal_on_device(dtype: str, evidence: Evidence) -> Measured | None:
    """Equal rows on a CUDA device, in per cent: all drafters and strategies at batch 1, 8 and 32."""
    lines = evidence.device(f"equality-{dtype}").get("lines", [])
    counts = [[int(word) for word in said.split() if word.isdigit()] for _, said, *_ in lines]
    return sampled([100 * equal / rows for equal, rows in counts], "{:.1f} %", f"{sum(c[1] for c in counts)} rows") if counts else None


SOAK = "python -m tools.soak 60"
OWN = [
    Claim(
        "own-equal",
        "Texts of unpadded speculation are those of plain decoding to the last token, in bfloat16, at batch 1 to 16.",
        "100 %",
        f"{EQUALITY} unpadded",
        AtLeast(100.0, "{:.1f} %"),
        partial(equal_rows, "unpadded", "draft_model", (1, 2, 4, 8, 16)),
    ),
    Claim(
        "own-equal-ten-thousand",
        "10,000 texts are those of plain decoding, with four drafters together: n-grams, a draft model's chains and trees, EAGLE's trees.",
        "100 %",
        f"{EQUALITY} rows",
        AtLeast(100.0, "{:.2f} %"),
        partial(whole, "equivalence/rows"),
    ),
    Claim(
        "own-long-equal",
        "Texts of 4,096 tokens are those of plain decoding.",
        "100 %",
        "python -m benchmarks.long_outputs",
        AtLeast(100.0, "{:.2f} %"),
        partial(whole, "long/b08"),
    ),
    Claim(
        "own-long-speed",
        "Speculation gains to the end of texts of 4,096 tokens, at batch 1 and 8.",
        "above 1 in every quarter",
        "python -m benchmarks.long_outputs",
        AtLeast(1.0),
        long_speed,
        why=long_steps,
    ),
    Claim(
        "own-vllm",
        "vLLM drafts the same tokens with an EAGLE-3 head that was trained here.",
        "all",
        "python -m benchmarks.eagle3_in_vllm",
        AtLeast(1.0, "{:.3f}"),
        same_drafts,
    ),
    Claim(
        "own-soak-wrong",
        "A server under load, with bad and abandoned requests, gives no wrong answer.",
        "0",
        SOAK,
        AtMost(0.0, "{:.0f}"),
        partial(soaked, "violations", "{:.0f}"),
    ),
    Claim(
        "own-soak-memory",
        "The memory of a server under load does not grow.",
        "1 MiB an hour at most",
        SOAK,
        AtMost(1.0, "{:.2f} MiB/h"),
        partial(soaked, "mib_an_hour", "{:.2f} MiB/h"),
        why=grown_by_half,
    ),
    Claim(
        "own-crosses",
        "Drafts of fixed length gain at batch 1 and no longer at batch 16 on this processor.",
        "the README says so",
        "python -m benchmarks.tables gain",
        Crosses(),
        falls_with_batch,
        is_merit=False,
    ),
    Claim(
        "own-fastest",
        "Batches without padding are the fastest of all strategies at batch 2 and more (padded ones on PyTorch's attention).",
        "the README says so",
        "python -m benchmarks.tables",
        AtLeast(100.0, "{:.0f} %"),
        fastest_unpadded,
    ),
    *(
        Claim(
            f"own-device-equal-{dtype}",
            f"On a CUDA device texts in {dtype} are those of plain decoding alone, with every kind of drafter and every strategy.",
            "100 %",
            f"scripts/gpu_check.sh equality-{dtype}",
            AtLeast(100.0, "{:.1f} %"),
            partial(equal_on_device, dtype),
            needs=DEVICE.format(f"equality-{dtype}"),
        )
        for dtype in ("float32", "bfloat16", "float16")
    ),
    *(
        Claim(
            f"own-peers-{processor.replace(' ', '').lower()}-{kind}-{batch}",
            f"On {PROCESSORS[processor]}, with weights of {kind.removeprefix('int')} bits and drafts as long as the engine decides, "
            f"decoding at batch {batch} is {AHEAD[batch]} times as fast as the best of vLLM, OpenVINO and llama.cpp in its best mode.",
            f"{AHEAD[batch]} is the aim; vLLM has no weights of 4 bits there" if kind == "int4" else f"{AHEAD[batch]} is the aim",
            f"echelon bench peers MODEL --vllm-python PYTHON --openvino-python PYTHON --llama-cpp FOLDER --quantization {kind} "
            f"--batch-sizes {batch} --num-prompts {max(8, batch)} --prompt-tokens 32 --max-tokens 64 --rounds 3",
            AtLeast(AHEAD[batch]),
            partial(beside_peers, name, batch),
            why=partial(beside_plain, name, batch),
        )
        for (processor, kind, batch), name in PEERS.items()
    ),
    *spec_bench_rows("ngram", 1.66, 1.75),
    *spec_bench_rows("draft_model", 1.52, 2.28),
]
