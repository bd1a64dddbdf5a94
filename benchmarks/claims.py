"""docs/claims.md: every claim of the papers beside what was measured of it, and the verdict that follows: `python -m benchmarks.claims`.

Nothing is measured here. A row's command measures what its verdict is computed from; its record lies in docs/evidence. The rules stand in
`benchmarks.verdicts` and in the page.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from benchmarks import categories
from benchmarks.cells import Records
from benchmarks.claims_of_eagle import EAGLES, SCYLLA
from benchmarks.claims_of_echelon import OWN
from benchmarks.claims_of_equality import EQSPEC
from benchmarks.claims_of_heads import CLOVER, MEDUSA
from benchmarks.claims_of_memory import SPECMEMO
from benchmarks.claims_of_padding import EMS_SD, LLMA, RATIOS
from benchmarks.document import EQUAL_DRAFTS, groups, ratio
from benchmarks.options import parser_of
from benchmarks.verdicts import (
    FAILS,
    HOLDS,
    LEAST_SAMPLES,
    NOT_HERE,
    NOT_MEASURED,
    Claim,
    Evidence,
    Judged,
    environments,
    judge,
    middle,
    over,
)
from benchmarks.workloads import ROOT
from echelon.bench.report import described, table
from echelon.inputs import write_text

PAPERS: Mapping[str, SequenceOf[Claim]] = {
    "EMS-SD (Ni et al. 2024, arXiv 2405.07542): batches without padding": EMS_SD,
    "EQSPEC and EXSPEC (Zhang et al. 2025, arXiv 2510.22876): batches that change no text": EQSPEC,
    "Medusa (Cai et al. 2024, arXiv 2401.10774)": MEDUSA,
    "Clover (Xiao et al. 2024, arXiv 2405.00263)": CLOVER,
    "EAGLE, EAGLE-2, EAGLE-3 (Li et al., arXiv 2401.15077, 2406.16858, 2503.01840)": EAGLES,
    "Scylla (Yan et al. 2025, arXiv 2505.07858)": SCYLLA,
    "SpecMemo (Yildirim and Chen 2025, arXiv 2506.01986)": SPECMEMO,
    "This project's own promises, and drafters of Spec-Bench without a head": OWN,
}
ABOUT = """Papers on speculative decoding claim speed-ups, tokens a step and equal texts. Each row below is one such claim: the published
figure, ours, the condition that ours has to meet, the verdict, and the command that measures it. Published figures are those of GPUs and of
trained models with billions of parameters; ours are those of two CPU cores or of two threads of a larger CPU, and a few of an H100 or H200,
with small models, or random ones in the shape of large models; [at the end](#machines-and-commits-of-the-evidence) each claim's machine is
named. That a figure holds or fails here says nothing of the paper's own machine. How fast this engine is beside others, and what it aims
at, stand among [the benchmarks](benchmarks.md).

*Plain decoding* is decoding without drafts, one token a step. *Tokens a step* are what a step emits for one row: the accepted drafted
tokens and the target's own. *Padded* batching fills rows up to the longest; *unpadded* batching, this engine's, lays them end to end. LLMA
drafts by copying from the prompt: "2/7" copies 7 tokens after a match of 2. Further words: [glossary](glossary.md)."""
RULES = f"""A verdict is computed from the evidence, by this rule, and never typed:

- **{HOLDS}**, **{FAILS}**: something was measured, and its median meets the condition in the column *rule*, or does not. Where *ours* lists
  several labelled values, the condition is on all of them, or on their order.
- **{NOT_HERE}**: nothing was measured, for it takes what the verdict names: a GPU, or weights, data or a judge that have to come from
  elsewhere. Where a GPU is missing, the verdict names the part of `scripts/gpu_check.sh` that measures the row on one.
- **{NOT_MEASURED}**: nothing was measured, and the command in the row would.

*ours* is a median, in brackets the least and the largest of its samples; samples are repeated runs, seeds or batch sizes. With fewer than
{LEAST_SAMPLES} it says how many, and of labelled values how many the one with the fewest has, where they are medians."""


BEFORE = """In commands `question.jsonl` is Spec-Bench's list of questions, `FILE` a list in its form with MT-Bench's alone, `MODEL` and
`HEAD` a checkpoint and a trained head, and `TARGET` the model that `make study` trains. `make heads` trains the heads that rows on
Medusa, Clover, EAGLE and SpecMemo name; without it EAGLE's is the embedded one. `PYTHON` and `FOLDER` are those of other engines
([how to install them](cli.md#echelon-bench-peers)). Rows on Scylla take hours on two cores, or a GPU. Most cells that have a record
of the same settings on the same processor are not measured again: delete their files below `docs/evidence` to repeat them."""


def judged_rows(evidence: Evidence) -> dict[str, list[Judged]]:
    """Every claim with its verdict, by paper."""
    return {paper: [judge(claim, evidence) for claim in claims] for paper, claims in PAPERS.items()}


def write_claims(folder: Path) -> Path:
    """Write the page below `folder` from the evidence that lies there."""
    evidence = Evidence(folder / "evidence")
    rows = judged_rows(evidence)
    everything = [row for own in rows.values() for row in own]
    parts = [
        "# Claims of the papers, and what holds here",
        ABOUT,
        f"{counted(everything)} `python -m benchmarks.claims` writes this page from the records in `evidence`.",
        *worse_part(everything, evidence),
        *unrepeated_part(everything),
        f"## How verdicts are made\n\n{RULES}",
        f"## Before you run a command\n\n{BEFORE}",
        *kernels_part(evidence),
        *memory_part(evidence),
    ]
    for paper, own in rows.items():
        parts += [f"## {paper}", paper_table(own)]
    parts += [*tasks_part(evidence), *machines_part(everything)]
    return write_text(folder / "claims.md", "\n\n".join(parts) + "\n", "--output")


def counted(rows: SequenceOf[Judged]) -> str:
    """How many rows have which verdict."""
    verdicts = (HOLDS, FAILS, NOT_MEASURED, NOT_HERE)
    return f"{len(rows)} claims: " + ", ".join(f"{sum(r.verdict.startswith(v) for r in rows)} *{v}*" for v in verdicts) + "."


def worse_part(rows: SequenceOf[Judged], evidence: Evidence) -> list[str]:
    """Where ours falls short, and why, before anything else; reasons that several rows have stand once."""
    reasons: dict[str, list[Judged]] = {}
    for row in rows:
        if row.is_worse:
            reasons.setdefault(row.claim.why(evidence) if row.claim.why else "no reason has been found yet", []).append(row)
    if not reasons:
        return ["## Where ours is worse than published\n\nNowhere, of what has been measured."]
    lines = []
    for reason, own in reasons.items():
        lines.append(f"- {reason[0].upper()}{reason[1:]}:")
        lines += [f"    - `{r.claim.name}`: {r.claim.sentence} Ours: {r.measured}." for r in own]
    count = sum(row.is_worse for row in rows)
    about = (
        f"{count} claims, each below the reason that it falls short here. Where a step with drafts is given beside a plain one, the "
        "speed-up is what it emits over how many times as long it takes. It takes longer because arithmetic, which grows with every token "
        "that is verified, bounds a step on two cores, from some 8 to 20 tokens on in 16 bits ([counted](benchmarks.md)), where a GPU "
        "still waits for memory and further tokens cost next to nothing."
    )
    return ["## Where ours is worse than published", about, "\n".join(lines)]


def unrepeated_part(rows: SequenceOf[Judged]) -> list[str]:
    """Claims of others' costs and methods that did not come out here."""
    found = [r for r in rows if r.verdict == FAILS and not r.claim.is_merit]
    lines = [f"- `{r.claim.name}`: {r.claim.sentence} Published: {r.claim.published}. Ours: {r.measured}." for r in found]
    about = (
        "What papers say of other methods, or of what these cost, and what did not come out so here. None of it is a shortcoming of this "
        "engine:"
    )
    return ["## What does not repeat here", about, "\n".join(lines)] if found else []


def kernels_part(evidence: Evidence) -> list[str]:
    """Unpadded over padded in both forms, by batch: the framework's attention against ours, and ours against ours."""
    lines = []
    for batch, published in sorted(RATIOS.items()):
        by_kernel = [evidence.speeds(name) for name in (f"benchmarks/rescaled-{batch:02d}", f"alike/opt_b{batch:02d}")]
        methods = ("replay 4.2", LLMA)
        values = [middle(over(s, (m, "unpadded"), (m, "padded"))) for s, m in zip(by_kernel, methods, strict=True)]
        lines.append((batch, *("–" if v is None else f"{v:.2f}" for v in values), published))
    found = Records(evidence.folder / "benchmarks").read()
    differing = [(b, ratio(own)) for _, method, b, own in groups(found) if b in (8, 16) and method not in EQUAL_DRAFTS]
    known = [value for _, value in differing if value is not None]
    spread = f" ({min(known):.1f} to {max(known):.1f} over comparisons at batch 8 and 16 whose drafts differ in length)" if known else ""
    return [
        "## Padding told apart from kernels",
        "How many times as fast unpadded decoding is as padded decoding; LLMA on random weights in the shape of OPT-1.3B, about 4 tokens a "
        f"step. In the [tables](benchmarks.md) `padded` runs on PyTorch's attention and `unpadded` on this engine's{spread}, so that their "
        "ratio mixes padding with kernels. With both on this engine's attention it is that of padding alone. At batch 1 nothing is padded: "
        "what the first column shows there, kernels alone bring.",
        table(["batch", "padded on PyTorch's attention", "both on this engine's", "published"], lines),
    ]


def memory_part(evidence: Evidence) -> list[str]:
    """What unpadding takes and saves in memory, beside its speed: EMS-SD's reviewers asked for it."""
    lines = []
    for batch in sorted(RATIOS):
        alike = [r for r in evidence.results(f"alike/opt_b{batch:02d}") if r.method == LLMA]
        found = {r.strategy: r for r in alike or evidence.results(f"benchmarks/table-opt-{batch:02d}") if r.method == LLMA}
        if "padded" in found and "unpadded" in found:
            pair = (found["padded"], found["unpadded"])
            held = [f"{r.kv_bytes_reserved / 2**20:,.0f}" for r in pair]
            indices = [f"{r.index_bytes / 2**10:,.1f}" for r in pair]
            lines.append((batch, *held, *indices, *(f"{r.decode_median:.1f}" for r in pair), "this engine's" if alike else "PyTorch's"))
    head = [
        "batch",
        "keys and values, MiB: padded",
        "unpadded",
        "indices, KiB: padded",
        "unpadded",
        "tokens/s: padded",
        "unpadded",
        "padded's attention",
    ]
    about = (
        "What unpadding takes in memory beside what it brings: slots held for keys and values, and the indices that say where rows and "
        "their slots are, averaged over steps; LLMA on random weights in the shape of OPT-1.3B."
    )
    return ["### Memory beside speed", about, table(head, lines)] if lines else []


def paper_table(rows: SequenceOf[Judged]) -> str:
    """A line a claim."""
    head = ["row", "the claim", "published", "ours", "rule", "verdict", "command"]
    lines = [
        (
            f"`{row.claim.name}`",
            row.claim.sentence,
            row.claim.published,
            row.measured or "–",
            row.claim.rule.text,
            f"**{row.verdict}**" if row.verdict in (HOLDS, FAILS) else row.verdict,
            f"`{row.command}`{row.differing}",
        )
        for row in rows
    ]
    return table(head, lines)


def tasks_part(evidence: Evidence) -> list[str]:
    """Spec-Bench by task, where it has been asked."""
    names = [path.stem for path in sorted((evidence.folder / "categories").glob("*.json"))]
    found = {name: record for name in names if (record := evidence.record(f"categories/{name}"))}
    about = (
        "Speed-up over plain decoding by the harness's own metric, in brackets tokens a step (`python -m benchmarks.categories`); drafts "
        "are as long as published (EAGLE-2's trees of 60 nodes, 10 copied tokens, 5 of a draft model), or as the engine decides (auto):"
    )
    return ["## Spec-Bench by task", about, categories.as_markdown(found)] if found else []


def machines_part(rows: SequenceOf[Judged]) -> list[str]:
    """Where what decides was measured."""
    found: dict[str, set[str]] = {}
    for row in rows:
        for record in row.records.values():
            for environment in environments(record):
                found.setdefault(described(environment), set()).add(f"`{row.claim.name}`")
    lines = [f"- {where}: {', '.join(sorted(names))}" for where, names in sorted(found.items())]
    return ["## Machines and commits of the evidence", "\n".join(lines)] if lines else []


def main(arguments: list[str] | None = None) -> int:
    """Write the page."""
    options = {"--output": {"type": Path, "default": ROOT / "docs", "help": "folder of the page; evidence lies below it"}}
    asked = parser_of(__doc__, options).parse_args(arguments)
    print(f"wrote {write_claims(asked.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
