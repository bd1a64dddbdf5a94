"""Weights of 8 and 4 bits beside bfloat16: `python -m benchmarks.quantised [--output FOLDER] [PREFIX ...]`, resumable by cell.

speed    by family: steps of plain decoding at batch 1 and 8, and of 64 tokens, over 256 tokens of context, of one model in bfloat16, int8
         and int4 by turns, and bytes; the model has random weights in the shape llama-1.1b
limits   by family: steps of 1 to 512 tokens beside their limits, as of `echelon bench step`
quality  held-out loss and greedy agreement with bfloat16, of the embedded model and of the same grown to 1.1 billion parameters
rounding of the embedded model in 4 bits: the same with activations that are not rounded, as GPTQ, AWQ and pack-quantized define them
texts    of the embedded model by every family: how many rows have the text of AVX2, and whether each that has not differs by a tie
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.cells import Cell, Record, Records, asked_of, run_asked, said
from benchmarks.families import AT_512, BESIDE, LIBRARIES, NEAR, SHAPE, in_family
from benchmarks.workloads import source
from echelon import LLM, SamplingParams
from echelon.bench.inflate import inflate, plan_growth
from echelon.bench.report import described, table
from echelon.bench.shapes import random_model
from echelon.bench.step import StepRounds
from echelon.bench.verify import Judge, first_difference
from echelon.demo import TARGET
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain
from echelon.model.load.publishing import publish
from echelon.model.patches.linear import packed_weights, weight_bytes
from echelon.ops import compiled
from echelon.settings import Quantization

KINDS = (None, "int8", "int4")
WIDTHS, CONTEXT, ROUNDS = (1, 8, 64), 256, 7
REFERENCE = "avx2"  # the family whose texts the others are beside
ALL_WIDTHS = (1, 4, 8, 16, 32, 64, 512)
GROWN, PARAMETERS = "grown", 1_100_000_000
GOALS = {  # over bfloat16 at batch 1, 8 and 64; families without products of bytes have their own
    "int8": {"avx2": (1.7, 1.2, 1.2), "": (1.7, 1.6, 1.5)},
    "int4": {"": (2.6, 0.0, 0.0)},
}
TITLE = "## Weights of 8 and 4 bits"
ABOUT = (
    "`python -m benchmarks.quantised`: steps of one model of the shape llama-1.1b with random weights, by turns in bfloat16 and in "
    "integers, 256 tokens before the new ones; limits as by family of instructions, the rate that of the fastest large product of integers "
    "that is exact: on AVX2 the framework's is not, so that it is that of these kernels alone; the loss is "
    "that of held-out Python source in nats a token, and agreement how often the likeliest token is that of bfloat16."
)
MOST_LOSS = {"int8": 1.02, "int4": 1.06}
MOST_BYTES = {"int8": 0.51, "int4": 0.30}


def speed() -> Record:
    """Milliseconds of a step by kind and width, by turns, and what its weights take."""
    models = {str(kind): random_model(SHAPE, quantization=kind) for kind in KINDS}
    rows = [(WIDTHS[:-1], 1), (WIDTHS[-1:], 8)]  # a token each, and the widest step in rows that are verified
    steps = {kind: [StepRounds(loaded, widths, count, CONTEXT) for widths, count in rows] for kind, loaded in models.items()}
    for _, own in product(range(ROUNDS + 1), steps.values()):
        for part in own:
            part.take()
    numbers = weight_bytes(models["None"].model)
    return {
        "results": {kind: [asdict(r) for part in own for r in part.results()] for kind, own in steps.items()},
        "layers": {kind: share_of_bytes(loaded) for kind, loaded in models.items()},
        "model": {kind: weight_bytes(loaded.model) / numbers for kind, loaded in models.items()},
    }


def limits(family: str) -> Record:
    """Steps of every width beside their limits."""
    narrow = ["--tokens", ",".join(map(str, ALL_WIDTHS[:-1])), "--rounds", str(ROUNDS)]
    wide = ["--tokens", "512", "--tokens-per-row", "512", "--context", "0", "--rounds", "3"]
    results: dict[str, list[Record]] = {}
    for kind in ("int8", "int4"):
        for words in (narrow, wide):
            printed = in_family(family, "echelon", "bench", "step", SHAPE, "--quantization", kind, *words, "--json")
            results.setdefault(kind, []).extend(json.loads(printed)["results"])
    return {"results": results}


def share_of_bytes(loaded: LoadedModel) -> float:
    """Bytes of the weights in integers over those of as many numbers of 16 bits; 1 where there are none."""
    rounded = [w for w in packed_weights(loaded.model) if w.integers.bits]
    return sum(w.data.nbytes for w in rounded) / sum(2 * w.columns * w.depth for w in rounded) if rounded else 1.0


def quality(size: str, num_texts: int, num_tokens: int) -> Record:
    """Loss of held-out text in nats a token, and how often the likeliest token is the one of bfloat16, by weights and KV cache."""
    plain, tokenizer = load_plain(str(TARGET))
    model = inflate(plain, plan_growth(plain, PARAMETERS)) if size == GROWN else plain
    found: dict[str, tuple[float, list[int]]] = {}
    for kind in KINDS:
        loaded = adopt_model(copy.deepcopy(model), tokenizer, size, keep_weights=False, quantization=kind)
        texts = source(loaded, num_texts, num_tokens, is_ragged=False)
        for kv in ("auto", "int8"):
            with LLM(loaded, max_num_seqs=4, kv_cache_dtype=kv, max_model_len=num_tokens + 1) as llm:
                found[f"{kind}, {kv}"] = _read(llm, texts)
        said(str(kind))
    base = found["None, auto"]
    return {
        "tokens": len(base[1]),
        "loss": {name: loss for name, (loss, _) in found.items()},
        "agreement": {name: sum(a == b for a, b in zip(told, base[1], strict=True)) / len(told) for name, (_, told) in found.items()},
    }


def rounding(num_texts: int, num_tokens: int) -> Record:
    """Loss and agreement of weights in 4 bits under activations of 8 bits and under numbers, beside the weights in bfloat16."""
    plain, tokenizer = load_plain(str(TARGET))
    models = {"bfloat16": adopt_model(plain, tokenizer, "bfloat16")}
    with tempfile.TemporaryDirectory() as folder:
        publish(str(TARGET), Path(folder) / "integers", "int4")
        models["int4, activations of 8 bits"] = load_model(Path(folder) / "integers")
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "integers", dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs(torch.tensor([[1]]))  # unpacks the weights
    meant = {f"{name}.weight": module.weight.detach() for name, module in theirs.named_modules() if isinstance(module, nn.Linear)}
    numbers, _ = load_plain(str(TARGET))
    numbers.load_state_dict(meant, strict=False)
    models["int4, activations in bfloat16"] = adopt_model(numbers, tokenizer, "numbers")
    texts = source(models["bfloat16"], num_texts, num_tokens, is_ragged=False)
    found = {}
    for name, loaded in models.items():
        with LLM(loaded, max_num_seqs=4, max_model_len=num_tokens + 1) as llm:
            found[name] = _read(llm, texts)
    *_, rounded, unrounded = (told for _, told in found.values())
    return {
        "loss": {name: loss for name, (loss, _) in found.items()},
        "agreement": sum(a == b for a, b in zip(rounded, unrounded, strict=True)) / len(rounded),
    }


def texts(num_texts: int, num_tokens: int) -> Record:
    """By weights and family: rows with the greedy text of AVX2, and differences that are no tie by the rule of `echelon verify`."""
    best, results = compiled.isa(), {}
    families = sorted(compiled.offered_isas(), key=lambda name: name != REFERENCE)
    kinds: tuple[Quantization, ...] = ("int8", "int4")
    try:
        for kind in kinds:
            truth: list[list[int]] = []
            for family in families:
                compiled.set_isa(family)
                loaded = load_model(TARGET, quantization=kind)
                prompts = [list(text) for text in source(loaded, num_texts, 32, is_ragged=False)]
                with LLM(loaded, max_num_seqs=8) as llm:
                    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens))
                told = [o.outputs[0].token_ids for o in outputs]
                truth = truth or told
                with LLM(load_model(TARGET, dtype="float32", quantization=kind)) as exact, LLM(loaded) as alone:
                    judge = Judge(exact, alone, in_integers=True)
                    parts = [(row, first_difference(told[row], truth[row])) for row in range(num_texts)]
                    found = [judge.compare(r, prompts[r], told[r], truth[r], place) for r, place in parts if place is not None]
                results[f"{kind}, {family}"] = {
                    "rows": num_texts,
                    "equal": num_texts - len(found),
                    "faults": sum(not m.is_tie for m in found),
                }
                said(f"{kind}, {family}")
    finally:
        compiled.set_isa(best)
    return {"results": results, "num_tokens": num_tokens}


def _read(llm: LLM, texts: SequenceOf[SequenceOf[int]]) -> tuple[float, list[int]]:
    """Mean loss of a token, and the likeliest token at every place."""
    losses, likeliest = [], []
    for text, output in zip(texts, llm.generate([list(t) for t in texts], SamplingParams(max_tokens=1, prompt_logprobs=1)), strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            losses.append(-entry[token].logprob)
            likeliest.append(max(entry, key=lambda t: entry[t].logprob))
    return math.fsum(losses) / len(losses), likeliest


def speed_lines(family: str, record: Record) -> list[tuple[str, ...]]:
    """Speed over bfloat16 by kind and batch, beside its goal."""
    base = [r["milliseconds"] for r in record["results"]["None"]]
    lines: list[tuple[str, ...]] = []
    for kind, goals in GOALS.items():
        for width, numbers, result, goal in zip(WIDTHS, base, record["results"][kind], goals.get(family, goals[""]), strict=True):
            ratio = numbers / result["milliseconds"]
            met = "" if not goal else "yes" if ratio >= goal else "**no**"
            goal_text = f"≥ {goal}" if goal else ""
            lines.append((f"{kind}, {width}", f"{numbers:.1f}", f"{result['milliseconds']:.1f}", f"{ratio:.2f}", goal_text, met))
    return lines


def limit_lines(record: Record) -> list[tuple[str, ...]]:
    """Times the larger limit, by kind and width."""
    lines: list[tuple[str, ...]] = []
    for kind, results in record["results"].items():
        for r in results:
            low, high = sorted((r["reading"], r["arithmetic"]))
            goal = AT_512 if r["tokens"] == 512 else NEAR if high <= 2 * low else BESIDE
            times = r["milliseconds"] / high
            lines.append((f"{kind}, {r['tokens']}", f"{r['milliseconds']:.1f}", f"{r['reading']:.1f}", f"{r['arithmetic']:.1f}"))
            lines[-1] += (f"{times:.2f}", f"≤ {goal}", "yes" if times <= goal else "**no**")
    return lines


def quality_lines(record: Record) -> list[tuple[str, ...]]:
    """Loss over that of bfloat16, and agreement, by weights and KV cache."""
    base = record["loss"]["None, auto"]
    lines: list[tuple[str, ...]] = []
    for name, loss in record["loss"].items():
        kind, kv = name.split(", ")
        most = MOST_LOSS.get(kind)
        met = "" if most is None or kv != "auto" else "yes" if loss <= most * base else "**no**"
        shown = ("bfloat16" if kind == "None" else kind, "bfloat16" if kv == "auto" else kv)
        lines.append((*shown, f"{loss:.4f}", f"{100 * (loss / base - 1):+.2f} %", f"{record['agreement'][name]:.1%}", met))
    return lines


def quantised_part(folder: Path) -> list[str]:
    """A section for every cell that was measured."""
    records = {name: record for name, record in Records(folder).read().items() if "failed" not in record}
    parts = []
    for name, record in records.items():
        kind, _, rest = name.partition("_")
        held = {"isa": rest} if kind in ("speed", "limits") else {}  # a family, maybe on a processor that has more
        parts += [f"### {kind.capitalize()}, {rest}", f"On {described(record['environment'] | held)}."]
        if kind == "speed":
            parts.append(table(["weights, tokens", "bfloat16, ms", "ms", "times as fast", "goal", "met"], speed_lines(rest, record)))
            shares = [f"{k}: {record['layers'][k]:.3f} in its layers, {record['model'][k]:.3f} in all" for k in ("int8", "int4")]
            parts.append(f"Bytes over those of bfloat16: {'; '.join(shares)}.")
        elif kind == "limits":
            parts.append(table(["weights, tokens", "ms", "reading", "arithmetic", "times the larger", "goal", "met"], limit_lines(record)))
        elif kind == "rounding":
            parts.append(table(["weights", "loss"], [(name, f"{loss:.4f}") for name, loss in record["loss"].items()]))
            parts.append(f"Of the likeliest tokens of the two in 4 bits {record['agreement']:.1%} are the same.")
        elif kind == "texts":
            lines = [(name, f"{r['equal']} of {r['rows']}", str(r["faults"])) for name, r in record["results"].items()]
            parts.append(table(["weights, family", f"rows with the text of {REFERENCE}", "differences that are no tie"], lines))
        else:
            parts.append(table(["weights", "KV cache", "loss", "over bfloat16", "agreement", "met"], quality_lines(record)))
    return [TITLE, ABOUT, *parts] if parts else []


def measured(what: str, family: str) -> Record:
    """A measurement of this module in a process of its own."""
    record: Record = json.loads(in_family(family, "benchmarks.quantised", "--measure", what).splitlines()[-1])
    return record


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of this commit; 1 if one fails."""
    asked = asked_of(__doc__, "quantised", {"--measure": {"choices": ["speed"], "help": argparse.SUPPRESS}}, arguments)
    if asked.measure:
        print(json.dumps(speed()))
        return 0
    families = [f for f in compiled.offered_isas() if f in LIBRARIES]
    cells = [Cell("quality_embedded", partial(quality, "embedded", 24, 512)), Cell("quality_grown", partial(quality, GROWN, 6, 256))]
    cells += [Cell("rounding_embedded", partial(rounding, 24, 512)), Cell("texts_embedded", partial(texts, 96, 64))]
    cells += [Cell(f"speed_{f}", partial(measured, "speed", f)) for f in families]
    cells += [Cell(f"limits_{f}", partial(limits, f)) for f in families]
    _, failed = run_asked(asked, cells)
    print("\n\n".join(quantised_part(asked.output)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
