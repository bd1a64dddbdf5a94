"""What EMS-SD (Ni et al. 2024) claims of batches without padding, and what was measured of it."""

from __future__ import annotations

from functools import partial
from itertools import product

from benchmarks.document_parts import PUBLISHED
from benchmarks.reasons import NOT_KEPT, dear_device_steps, dear_steps, step_ms
from benchmarks.verdicts import (
    AtLeast,
    AtMost,
    Claim,
    Crosses,
    Evidence,
    Measured,
    Ordered,
    Within,
    labelled,
    medians,
    middle,
    over,
    sampled,
)

LLMA, LAUNCHED = "replay LLMA", "replay LLMA, no graphs"
RATIOS = PUBLISHED | {12: 1.83, 20: 2.09}  # EMS over vanilla; of figure 1, speed-ups divided, where Table 2 has no row
SPEED_UPS = {1: 3.94, 2: 3.50, 4: 2.83, 8: 2.17, 12: 1.81, 16: 1.63, 20: 1.46, 24: 1.41}  # EMS over plain decoding
VANILLA = {1: 3.94, 2: 3.21, 4: 2.26, 8: 1.37, 12: 0.99, 16: 0.83, 20: 0.70, 24: 0.66}
ON_DEVICE = (1, 8, 16, 24)
OTHERS = (("padded speculation", RATIOS, (LLMA, "padded")), ("plain decoding", SPEED_UPS, ("plain", "unpadded")))
DEVICE = "a CUDA device; the cell `{}` of `scripts/gpu_check.sh` measures it"


# counted reasons


def few_emitted(published: float, batch: int, evidence: Evidence) -> str:
    """What steps emit and take, in the record that decides."""
    for name, method in ((f"alike/opt_b{batch:02d}", LLMA), (f"benchmarks/rescaled-{batch:02d}", "replay 4.2")):
        if evidence.results(name):
            return dear_steps(name, method, published, evidence)
    return NOT_KEPT


def padding_counted(evidence: Evidence, batch: int) -> str:
    """How much of a step of `padded` is padding, which is all that there is to gain."""
    found = {r.strategy: r for r in evidence.results(f"alike/opt_b{batch:02d}") if r.method == LLMA}
    if "padded" not in found:
        return "padding has not been counted"
    padded, tight = found["padded"], found["unpadded"]
    ms = [step_ms(r) for r in (padded, tight)]
    return (
        f"pads are {padded.padded_input_share:.0%} of the inputs and {padded.padded_kv_share:.0%} of the keys that `padded` reads; "
        f"a step takes {ms[0]:.0f} ms with them and {ms[1]:.0f} without"
    )


# EMS-SD


def ratio_alike(batch: int, evidence: Evidence) -> Measured | None:
    """Unpadded over padded, both on our attention."""
    return sampled(over(evidence.speeds(f"alike/opt_b{batch:02d}"), (LLMA, "unpadded"), (LLMA, "padded")))


def gain(batch: int, evidence: Evidence) -> Measured | None:
    """Unpadded over plain decoding, at as many tokens a step as the published speed at batch 1 takes; else as the tables have it."""
    for name, method in ((f"alike/opt_b{batch:02d}", LLMA), (f"benchmarks/rescaled-{batch:02d}", "replay 4.2")):
        found = over(evidence.speeds(name), (method, "unpadded"), ("plain", "unpadded"))
        if found:
            a_step = next(r.tokens_per_step for r in evidence.results(name) if (r.method, r.strategy) == (method, "unpadded"))
            return sampled(found, note=f"{a_step:.2f} tokens a step")
    return None


def by_batch(strategy: str, evidence: Evidence) -> Measured | None:
    """A strategy on our attention over plain decoding, by batch."""
    speeds = {b: evidence.speeds(f"alike/opt_b{b:02d}") for b in RATIOS}
    return medians({f"batch {b}": over(s, (LLMA, strategy), ("plain", "unpadded")) for b, s in sorted(speeds.items())})


def inputs_over_keys(evidence: Evidence) -> Measured | None:
    return sampled(over(evidence.speeds("alike/opt_b08"), (LLMA, "padded-kv"), (LLMA, "padded-inputs")))


def dead_slots(evidence: Evidence) -> Measured | None:
    """The largest share of padding in the keys that a method with drafts reads, by batch."""
    found = {f"batch {b}": evidence.results(f"benchmarks/table-opt-{b:02d}") for b in PUBLISHED}
    drafting = {name: [r for r in own if r.strategy == "unpadded" and r.method != "plain"] for name, own in found.items()}
    return labelled({name: max((100 * r.padded_kv_share for r in own), default=None) for name, own in drafting.items()}, "{:.1f} %")


def on_device(batch: int, others: tuple[str, str], evidence: Evidence) -> Measured | None:
    """Unpadded over another, on OPT-6.7B in float16. Padded strategies never have graphs, and what they are compared with has none then."""
    speeds = {(r.method, r.strategy): r.decode_tokens_per_second for r in evidence.device_results(f"table-OPT-6.7B-{batch:02d}")}
    if others != (LLMA, "padded"):
        return sampled(over(speeds, (LLMA, "unpadded"), others))
    graphs = middle(over(speeds, (LLMA, "unpadded"), (LAUNCHED, "unpadded")))
    note = "both without CUDA graphs" + (f", which bring another {graphs:.2f}" if graphs else "")
    return sampled(over(speeds, (LAUNCHED, "unpadded"), others), note=note)


def device_inputs_over_keys(evidence: Evidence) -> Measured | None:
    speeds = {(r.method, r.strategy): r.decode_tokens_per_second for r in evidence.device_results("table-OPT-6.7B-08")}
    return sampled(over(speeds, (LLMA, "padded-kv"), (LLMA, "padded-inputs")))


def launches(batch: int, evidence: Evidence) -> str:
    """What a step waits for on a device, from its own times."""
    found = {(r.method, r.strategy): r for r in evidence.device_results(f"table-OPT-6.7B-{batch:02d}") if r.step_ms}
    names = ((LLMA, "padded"), (LAUNCHED, "unpadded"), (LLMA, "unpadded"))
    if any(name not in found for name in names):
        return NOT_KEPT
    padded, launched, captured = (step_ms(found[name]) for name in names)
    return (
        f"a step of padded speculation, {found[names[0]].padded_input_share:.0%} of whose inputs are pads, takes {padded:.0f} ms, and one "
        f"without pads {launched:.0f}: both wait for kernels to be launched, since as one CUDA graph the latter takes {captured:.0f}"
    )


def articles(evidence: Evidence) -> Measured | None:
    """Of the largest OPT that the script was run with."""
    for size in ("6.7b", "2.7b", "1.3b", "350m"):
        found = [r for r in evidence.results(f"opt_cnn_dailymail/opt-{size}/throughput") if (r.method, r.batch_size) == ("LLMA", 8)]
        if found:
            speeds = {r.strategy: r.decode_tokens_per_second for r in found}
            return sampled(over(speeds, "unpadded", "padded"), note=f"OPT-{size}")
    return None


SETTING = "OPT-6.7B, LLMA 2/7, CNN/Daily Mail, a GPU"
COMMAND = "python -m benchmarks.alike opt_b{:02d}"
EMS_SD = [
    Claim(
        "padding-1",
        "At batch 1, where nothing is padded, padded and unpadded decoding are equally fast, so that larger batches measure padding alone.",
        f"1.00 ({SETTING})",
        COMMAND.format(1),
        Within(0.97, 1.03),
        partial(ratio_alike, 1),
        is_merit=False,
    ),
    *(
        Claim(
            f"padding-{batch}",
            f"Unpadding inputs and keys is {RATIOS[batch]} times as fast as padding both, at batch {batch}, both on our attention.",
            f"{RATIOS[batch]} ({SETTING})",
            COMMAND.format(batch),
            AtLeast(RATIOS[batch]),
            partial(ratio_alike, batch),
            why=partial(padding_counted, batch=batch),
        )
        for batch in sorted(RATIOS)[1:]
    ),
    *(
        Claim(
            f"gain-{batch}",
            f"Unpadded speculation is {published} times as fast as plain decoding at batch {batch}.",
            f"{published} ({SETTING})",
            COMMAND.format(batch),
            AtLeast(published),
            partial(gain, batch),
            why=partial(few_emitted, published, batch),
        )
        for batch, published in SPEED_UPS.items()
    ),
    Claim(
        "vanilla-crosses",
        "Padded speculation gains at batch 1 and loses to plain decoding at large batches.",
        f"by batch {', '.join(f'{b}: {s}' for b, s in VANILLA.items())}",
        "python -m benchmarks.alike opt_b",
        Crosses(),
        partial(by_batch, "padded"),
        is_merit=False,
    ),
    Claim(
        "unpadded-falls",
        "The speed-up of unpadded speculation falls as the batch grows.",
        f"by batch {', '.join(f'{b}: {s}' for b, s in SPEED_UPS.items())}",
        "python -m benchmarks.alike opt_b",
        Ordered(rises=False),
        partial(by_batch, "unpadded"),
        is_merit=False,
    ),
    Claim(
        "inputs-first",
        "Unpadding inputs alone brings more than unpadding keys alone (the paper's table; its caption says the opposite).",
        "2.02 against 1.47 over plain decoding at batch 8: 1.37",
        COMMAND.format(8),
        AtLeast(1.0),
        inputs_over_keys,
        is_merit=False,
    ),
    Claim(
        "no-dead-slots",
        "Unpadded batches load no padding: every key that is read belongs to a token.",
        "0 by construction",
        "python -m benchmarks.tables table-opt",
        AtMost(0.0, "{:.1f} %"),
        dead_slots,
    ),
    Claim(
        "articles",
        "Unpadding is 1.59 times as fast as padding both at batch 8, on the paper's own 480 articles and trained weights.",
        "1.59 over padding and 2.17 over plain decoding at batch 8",
        "python scripts/opt_cnn_dailymail.py --output docs/evidence/opt_cnn_dailymail",
        AtLeast(1.59),
        articles,
        needs="trained weights of OPT and the CNN/Daily Mail articles, which have to be downloaded",
    ),
    *(
        Claim(
            f"device-{others[0].split()[0]}-{batch}",
            f"At the paper's own size, on a GPU, unpadded speculation is {published[batch]} times as fast as {what} at batch {batch}.",
            f"{published[batch]} ({SETTING})",
            f"scripts/gpu_check.sh table-OPT-6.7B-{batch:02d}",
            AtLeast(published[batch]),
            partial(on_device, batch, others),
            needs=DEVICE.format(f"table-OPT-6.7B-{batch:02d}"),
            why=partial(launches, batch)
            if others[0] == LLMA
            else partial(dear_device_steps, f"table-OPT-6.7B-{batch:02d}", LLMA, published[batch]),
        )
        for batch, (what, published, others) in product(ON_DEVICE, OTHERS)
    ),
    Claim(
        "device-inputs-first",
        "On a GPU too, unpadding inputs alone brings more than unpadding keys alone.",
        f"2.02 against 1.47 over plain decoding at batch 8 ({SETTING})",
        "scripts/gpu_check.sh table-OPT-6.7B-08",
        AtLeast(1.0),
        device_inputs_over_keys,
        needs=DEVICE.format("table-OPT-6.7B-08"),
        is_merit=False,
    ),
]
