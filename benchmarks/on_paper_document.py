"""docs/on_paper.md, from the records of `benchmarks.on_paper`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cells import Record
from benchmarks.document_parts import listed
from echelon.bench.report import described, table
from echelon.estimate.devices import read_devices
from echelon.inputs import write_text

PaperRecords = Mapping[str, Record]
ABOUT = (
    "How much memory and time would a model take on devices that are not here? `echelon plan` estimates it; this page has the formulas, "
    "compares them with what was measured here or published by others, and estimates published systems. **Nothing on this page was "
    "measured on several devices.** Every figure is computed from published data of devices (`src/echelon/estimate/devices.json`, each "
    "with its source) and shapes of models (`shapes.json` beside it), by a roofline model: each part of a step takes as long as its "
    "arithmetic or its memory traffic, whichever is longer. Where there are pipeline stages, the engine's schedule is simulated. What was "
    "measured or published is named so. The page is written by `python -m benchmarks.on_paper` from `evidence/on_paper/*.json`."
)
COMMAND = """```sh
echelon plan llama-70b --device a100-80gb -tp 4 --max-num-seqs 32
echelon plan llama-70b --device mi250-die -pp 8 --speculative-config.method eagle --tokens-per-step 3
```"""
MODEL = """The first argument is a folder with a model, or the name of a published shape. `-tp` is the number of tensor-parallel ranks,
`-pp` that of pipeline stages ([several ranks](parallel.md) says what these are).

## How it is computed

- *A forward pass*: for linear layers, experts, attention and the output layer each the larger of operations ÷ the device's operations a
  second and bytes ÷ its memory bandwidth, for the part of the layers that the device has; these times add up.
- *Weights in integers* (`--quantization int8` or `int4`) take the bytes of our kernels' layout and are read in as many. They are multiplied
  at the device's rate of 8-bit integers where its entry has one (`int8`), else at its rate in 16 bits. (The engine serves them on CPUs
  alone.)
- *Between ranks*: a gather takes the link's latency and the bytes that a rank gets from others ÷ the link's bandwidth. Each rank has what
  `model/patches/split.py` gives it; a test compares that with real shards, number by number.
- *Between stages* go hidden states. Rows are divided into as many lanes as there are stages, as in the engine. The first stage drafts for a
  lane, its pass goes through all stages, and the first stage runs the output layer for it; meanwhile other lanes are in other stages.
- *Drafting* is counted from the head's own code.
- *Tokens a step* are given (`--tokens-per-step`), or those published for the method. With another number of drafted tokens, those of a tree
  grow with the logarithm of its nodes, those of a chain as if every token had the same chance of acceptance.

Left out are Python, kernel launches and synchronisation unless a device's entry has them (`layer_us`), prompts, the drafter's keys and
values, and whatever else keeps kernels from the roofline. So speeds are upper bounds; ratios between two runs on the same devices are more
reliable.

A device of your own is an entry in a JSON file, given by `--devices FILE`; `echelon bench kernels` measures its two rates, bandwidth and
arithmetic."""


def write_on_paper(folder: Path, records: PaperRecords) -> Path:
    """Write the page below `folder`."""
    known = {name: record for name, record in records.items() if "failed" not in record}
    parts = ["# Several devices, on paper", ABOUT, COMMAND, MODEL, *devices_part()]
    makers = {
        "here": here_part,
        "plans": plans_part,
        "stages": stages_part,
        "scylla": scylla_part,
        "padding": padding_part,
        "replicas": replicas_part,
    }
    for name, make in makers.items():
        if name in known:
            parts += make(known[name])
    return write_text(folder / "on_paper.md", "\n\n".join(parts) + "\n", "--output")


def devices_part() -> list[str]:
    """The table of devices."""
    rows = [
        (
            name,
            f"{d.memory_gb:g}",
            f"{d.read_gb:,g}",
            f"{d.tflops.get('bfloat16', d.tflops.get('float16', 0.0)):,g}",
            f"{d.link_gb:g}, {d.link_us:g} µs",
            d.source,
        )
        for name, d in read_devices().items()
    ]
    return listed("## Devices", [table(["device", "GB", "GB/s", "TFLOP/s in 16 bits", "link: GB/s, latency", "from"], rows)])


def here_part(record: Record) -> list[str]:
    """The model beside what was measured on one machine."""
    errors = [s["predicted_ms"] / s["ms"] - 1 for s in record["steps"] if s["tokens"] > 1]  # of one token what a layer takes is fitted
    rows = [
        (
            s["model"],
            s["tokens"],
            f"{s['ms']:.1f}",
            f"{s['predicted_ms']:.1f}",
            f"{s['predicted_ms'] / s['ms'] - 1:+.0%}",
            *(f"{s[f'{part}_ms'][0]:.1f}, {s[f'{part}_ms'][1]:.1f}" for part in ("linear", "attention")),
        )
        for s in record["steps"]
    ]
    one, ranks = record["ranks"]["one_ms"], record["ranks"]["ranks_ms"]
    lost = ranks[0] - ranks[1]
    return listed(
        "## Beside what was measured here",
        [
            "Forward passes of one engine (`evidence/step.json`, `step-opt.json`: AMD EPYC, 2 cores). The bandwidth is that of reading the "
            "weights in the same run, the arithmetic that of the largest product in `kernels.json`. The time between kernels is fitted to "
            "the pass over one token, so that first line is no prediction.",
            table(["model", "tokens", "ms, measured", "ms, predicted", "error", "linear layers: both", "attention: both"], rows),
            f"The median error is {statistics.median(map(abs, errors)):.0%}, the largest {max(map(abs, errors)):.0%}. Where it is large, "
            "the prediction is too fast: attention reaches a third to a half of the arithmetic rate of large products here, and the linear "
            "layers of OPT seven eighths from 32 tokens on.",
            f"Two ranks of one core each (`ranks.json`, 1.1 B parameters, batch 8): one engine {one[0]:.1f} ms measured, {one[1]:.1f} "
            f"predicted ({one[1] / one[0] - 1:+.0%}); two ranks {ranks[0]:.1f} measured, {ranks[1]:.1f} predicted "
            f"({ranks[1] / ranks[0] - 1:+.0%}), if gathers took only the time of their bytes. The difference of {lost:.1f} ms is "
            f"{lost / record['ranks']['gathers'] * 1e3:.0f} µs for each of the {record['ranks']['gathers']} gathers of a pass, at each of "
            "which the faster rank waits for the slower. Single rounds spread from "
            f"{min(o for o, _ in record['ranks']['rounds']):.0f} to {max(o for o, _ in record['ranks']['rounds']):.0f} ms for the one "
            "engine.",
        ],
    )


def plans_part(record: Record) -> list[str]:
    """Shapes on devices."""
    rows = []
    for line in record["lines"]:
        where = f"{line['ranks'] * line['stages']} × {line['device']}"
        how = f"{line['ranks']} ranks" if line["ranks"] > 1 else f"{line['stages']} stages" if line["stages"] > 1 else "–"
        fits = f"{line['bytes'] / 1e9:.0f} of {line['memory'] / 1e9:.0f}"
        least = "none" if line["least"] is None else str(line["least"][0] * line["least"][1])
        speeds = [line["speeds"][b] for b in ("1", "8", "32")] if "1" in line["speeds"] else [line["speeds"][b] for b in (1, 8, 32)]
        told = [f"{plain:,.0f}, {drafted:,.0f} ({count})" for plain, drafted, count in speeds]
        rows.append((line["shape"], where, how, fits if line["fits"] else f"**{fits}**", least, f"{line['sent'] / 1e6:,.0f}", *told))
    head = ["shape", "devices", "split", "GB of a device", "least devices", "MB sent a step", *(f"tokens/s at {b}" for b in (1, 8, 32))]
    return listed(
        "## Shapes on devices",
        [
            f"Memory: for {record['rows']} rows of {record['length']:,} tokens in 16 bits, the bytes of the fullest device and what it has "
            "(bold: too much for it), the least number of such devices that would do, and what one plain step of all rows sends between "
            f"them. Speed: tokens/s of 1, 8 and 32 rows that are {record['length'] // 2:,} tokens long, plain, and with EAGLE's trees of "
            "up to 48 tokens (4.48 tokens a step, as published for 70 B); in brackets how many tokens the plan drafts for a row. Where "
            "memory does not suffice, speeds are those that the same devices would have with more of it.",
            table(head, rows),
        ],
    )


def stages_part(record: Record) -> list[str]:
    """SpecMemo's eight stages."""
    batches, published = record["batches"], record["published"]
    theirs = {int(b): v for b, v in published["speculative"].items()}
    plain = {int(b): v for b, v in published["plain"].items()}
    rows = [
        (
            "published (8 × MI250)",
            *(f"{theirs[b]} ({theirs[b] / plain[b]:.2f})" if b in plain else str(theirs[b]) for b in batches),
            f"{theirs[batches[-1]] / theirs[batches[0]]:.2f}",
        )
    ]
    for name, found in record["variants"].items():
        cells = [f"{s:.1f} ({s / p:.2f}; {n})" for p, s, n in zip(found["plain"], found["speculative"], found["drafted"], strict=True)]
        rows.append((name, *cells, f"{found['speculative'][-1] / found['speculative'][0]:.2f}"))
    ours = next(iter(record["variants"].values()))
    gains = dict(zip(batches, (s / p for p, s in zip(ours["plain"], ours["speculative"], strict=True)), strict=True))
    growth, published_growth = ours["speculative"][-1] / ours["speculative"][0], theirs[batches[-1]] / theirs[batches[0]]
    tokens = ", ".join(f"{n}: {t:.2f}" for n, t in record["tokens_per_step"].items())
    besides = record["besides"]
    return listed(
        "## SpecMemo's eight stages",
        [
            "Llama-2-70B, 10 layers on each of eight dies of MI250s (software sees a die as a device), Medusa's heads on the first, 512 "
            "tokens before each row's own. Tokens a step follow from the accuracies that Medusa's authors published for heads of 33 B, "
            f"as Medusa's own tree search counts them; by drafted tokens: {tokens}. The table has tokens/s with drafts, in brackets "
            "how many times plain decoding in batches on the same stages, and the number of drafted tokens at which it is fastest; the "
            "last column is the growth from batch 1 to 10.",
            table(["", *(f"batch {b}" for b in batches), "1 → 10"], rows),
            f"As the engine runs it the ratios are {gains[4]:.2f} at batch 4 (published {theirs[4] / plain[4]:.2f}), {gains[10]:.2f} at "
            f"10 ({theirs[10] / plain[10]:.2f}), and batch 10 has {growth:.2f} times the throughput of batch 1 "
            f"({published_growth:.2f}). What each part brings:",
            stage_findings(record),
            "*The time that the published system takes besides* is fitted to its plain decoding at batch 4 and 10 alone: "
            f"{besides['layer_us']:,.0f} µs a layer and {besides['row_us']:,.0f} µs a row and stage, where the roofline has "
            f"{_per_layer(record):,.0f} µs a layer.",
        ],
    )


def _per_layer(record: Record) -> float:
    ours: dict[str, Any] = next(iter(record["variants"].values()))
    return float(1e6 / ours["plain"][0] / 80)


def stage_findings(record: Record) -> str:
    """What the variants say, by comparison."""
    v, batches = record["variants"], record["batches"]
    ten, four = batches.index(10), batches.index(4)

    def gain(name: str, at: int) -> float:
        return float(v[name]["speculative"][at] / v[name]["plain"][at])

    names = list(v)
    waiting, fixed, both, static, slow, here, held = (names[i] for i in (1, 2, 4, 5, 6, 9, 10))
    published = {int(b): s for b, s in record["published"]["speculative"].items()}
    off = {b: v[slow]["speculative"][i] / published[b] - 1 for i, b in enumerate(batches)}
    return "\n".join(
        (
            f"- *Tree sizes by batch*: with 43 nodes always, {gain(fixed, ten):.2f} at batch 10: a die does 110 operations while it reads "
            "a byte, so that more than about 110 tokens in a stage are not free.",
            f"- *Lanes*: the same trees with one stage at work at a time come to {gain(both, ten):.2f} at batch 10; wide trees need all "
            "stages at once. Where all rows are drafted for together, so that lanes wait for one another once a step, all stages are at "
            f"work for a part of it: {v[waiting]['speculative'][ten]:.0f} tokens/s at batch 10 instead of "
            f"{v[names[0]]['speculative'][ten]:.0f}.",
            "- *Static batches*, in which nothing is added until the last text has ended, cost "
            f"{1 - v[static]['speculative'][ten] / v[both]['speculative'][ten]:.0%} at batch 10; the engine lets a new text in as "
            "soon as one ends.",
            "- *What else the published system takes* hides arithmetic behind it: with it, fixed trees and one stage at a time, the "
            f"model says {v[slow]['speculative'][four]:.1f} and {v[slow]['speculative'][ten]:.1f} tokens/s at batch 4 and 10 "
            f"({off[4]:+.0%}, {off[10]:+.0%} of the published), {v[slow]['speculative'][1]:.1f} at batch 2 ({off[2]:+.0%}) and "
            f"{v[slow]['speculative'][0]:.1f} at batch 1 ({off[1]:+.0%}). By the published figures a step at batch 1 takes longer than "
            "one at batch 2 or 4, which no term here explains; without that there would be no growth of eight times.",
            "- *Stages of this machine* (steps of `evidence/step.json`, made longer by the ratio of numbers; wider ones by the last "
            f"slope) come to {gain(here, four):.2f} at batch 4 and {gain(here, ten):.2f} at 10, and to "
            f"{v[here]['speculative'][ten] / v[here]['speculative'][0]:.2f} times the throughput of batch 1 at batch 10. With lanes that "
            f"wait for one another the same stages come to {gain(held, four):.2f} and {gain(held, ten):.2f}, and to "
            f"{v[held]['speculative'][ten] / v[held]['speculative'][0]:.2f} times.",
        )
    )


def scylla_part(record: Record) -> list[str]:
    """Table 5."""
    rows = [
        (
            line["batch"],
            *(f"{t:,.0f} ({p:,})" for t, p in zip(line["predicted"][:3], line["published"], strict=True)),
            f"{line['predicted'][3]:,.0f}",
            f"{line['by_law']}, {line['drafted']}",
        )
        for line in record["lines"]
    ]
    names = ("plain", "EAGLE-2, 60 nodes", "Scylla, k_opt of its law")
    errors = ", ".join(
        f"{name} {median:.0%} (at most {most:.0%})"
        for name, median, most in zip(names, record["error"], record["largest_error"], strict=True)
    )
    eagle, own = record["tokens_per_step"]
    return listed(
        "## Scylla's 72 B on four devices",
        [
            "Qwen2.5-72B on four H800, tensor ranks, 10,000 tokens before each row's own; tokens/s predicted (published in its Table 5, "
            "by a secondary source). Fitted are three numbers, all to batch 1: the share of the published bandwidth that plain decoding "
            f"reaches ({record['bandwidth']:.2f}), and tokens a step of EAGLE-2 ({eagle:.2f}) and Scylla ({own:.2f}) with 60 nodes. "
            "Arithmetic is the published, heads are shared out among ranks. All other rows are predicted.",
            table(["batch", *names, "fastest tree by the model", "nodes: law, model"], rows),
            f"Median errors: {errors}. That EAGLE-2 with 60 nodes falls below plain decoding from batch 32 is predicted by arithmetic "
            "alone. The law's k_opt is where arithmetic begins to bind, which is not where most tokens a second come out: the model "
            "would draft fewer, and be faster, but for what the logarithm of the nodes promises of small trees.",
            f"64 rows of 10,000 tokens would take {record['gib_needed']:.0f} GiB with the weights, and four H800 have "
            f"{record['gib']:.0f}: the largest batches of the table had shorter texts, or keys and values in fewer bits.",
        ],
    )


def padding_part(record: Record) -> list[str]:
    """EMS-SD at 70 billion parameters."""
    rows = []
    for line in record["lines"]:
        token, row = line["once a token"], line["once a row"]
        published = f"{line['published']:.2f}" if line["published"] else "–"
        ratios = [f"{own['vanilla'] / own['unpadded']:.2f}" for own in (token, row)]
        gains = [f"{row['plain'] / row[name]:.2f}" for name in ("vanilla", "unpadded")]
        where = f"{line['ranks']} × {line['device']}"
        rows.append(
            (line["shape"], where, line["batch"], published, *ratios, *gains, f"{row['padded_tokens']:.0%}, {row['padded_keys']:.0%}")
        )
    large = [line for line in record["lines"] if not line["published"]]
    ratios = [line["once a row"]["vanilla"] / line["once a row"]["unpadded"] for line in large]
    head = ["shape", "devices", "batch", "published", "keys read by token", "keys read by row", "vanilla × plain", "unpadded × plain"]
    return listed(
        "## EMS-SD's batches at 70 B",
        [
            f"LLMA's drafts, replayed at {record['tokens_per_step']} tokens a step, 128 new tokens after prompts of about 900 (assumed), "
            "static batches. The ratios are speeds of unpadded batches over those of padded ones, the paper's *vanilla*. EMS-SD published "
            "them for 6.7 B alone. Its kernel reads a row's keys and values twice for every token fed, ours once for the row; the "
            "published ratios lie between what is computed for the two:",
            table([*head, "padding of tokens, of keys"], rows),
            f"At 70 B and batch 8 to 64 unpadding brings {min(ratios):.2f} to {max(ratios):.2f} where keys are read once a row: less than "
            "at 6.7 B at equal batch on paper, because padded tokens are free until a step is bound by arithmetic (about 150 tokens on "
            "an A100, 300 on an H100), and keys and values of 8 heads are an eighth. From there on all padded tokens cost what they "
            "weigh, and vanilla's half of them brings it towards plain decoding; unpadded batches stay ahead of it.",
        ],
    )


def replicas_part(record: Record) -> list[str]:
    """Up to 1,000 replicas."""
    rows, rules = [], list(record["lines"][0]["loads"])
    for line in record["lines"]:
        loads = [f"{line['loads'][rule][0]:.2f}, {line['loads'][rule][1]:.0%}" for rule in rules]
        work = f"{line['lookup_us']:.0f} µs, {line['core_share']:.1%} of a core"
        rows.append((f"{line['replicas']:,}", work, f"{line['megabytes_per_second']:,.1f}", f"{line['probes_per_second']:g}", *loads))
    last = record["lines"][-1]
    return listed(
        "## Up to 1,000 replicas",
        [
            "[Replicas](replicas.md) are engines of their own: nothing of a step passes between them, so what grows with their number is "
            "the work of choosing one for a request. Choosing by a conversation's beginning was timed here in Python (a hash of 4 kB and a "
            f"search on a ring of 64 points a replica; {described(record['environment'])}). Traffic is computed for 2 requests a second on "
            "each replica, with 1,000 tokens of prompt and 200 events of 200 bytes each; health is asked every 5 s. Loads are simulated "
            "with 32 conversations a replica. The last three columns are ways to choose: by the hash alone, the emptier of two "
            "drawn at random, and by the hash unless that replica has 1.25 of its share; of each the load of the fullest replica over the "
            "mean, and how many of a conversation's turns go to the replica that has its prefix.",
            table(["replicas", "choosing a request", "MB/s through the gateway", "probes a second", *rules], rows),
            f"A hundred times the replicas make a choice {last['lookup_us'] / record['lines'][1]['lookup_us']:.1f} times as long, and "
            f"1,000 of them keep one chooser {last['core_share']:.0%} busy. What passes through it, {last['megabytes_per_second']:.0f} "
            "MB/s in 400,000 events a second, needs more than one process first; the choice itself has no state but the ring "
            "and the loads, so that any number of gateways choose alike.",
        ],
    )
