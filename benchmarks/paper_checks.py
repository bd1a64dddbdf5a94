"""What the model of `echelon plan` says beside what was measured here, and beside Scylla's published table for 72 billion parameters."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cells import Record
from benchmarks.laws_document import PUBLISHED
from echelon.bench.balance import published_k_opt
from echelon.estimate.devices import Device, read_devices
from echelon.estimate.drafting import Acceptance, DraftingCost, drafting_of
from echelon.estimate.layout import Pass, split_among
from echelon.estimate.shapes import PaperModel, without_weights
from echelon.estimate.speed import Cluster
from echelon.speculative_config import SpeculativeConfig

EVIDENCE = Path("docs/evidence")
STEPS = ("step", "step-opt")
RANKS_CONTEXT = 48  # of benchmarks.ranks: a prompt of 32 tokens and half of 32 new ones
SCYLLA_CONTEXT, SCYLLA_RANKS = 10_000, 4
EAGLE_2 = {"method": "eagle", "tree": "dynamic", "num_speculative_tokens": 60, "tree_top_k": 10, "tree_depth": 6}
SCYLLA_NODES = (4, 8, 16, 32, 60)


def measured_here() -> Record:
    """Steps of one engine, and of two ranks, beside what the roofline says."""
    return {"steps": list(_steps()), "ranks": _ranks()}


def _read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((EVIDENCE / f"{name}.json").read_text("utf-8"))
    return record


def _machine(model: PaperModel, record: dict[str, Any]) -> Device:
    """This machine as its own runs show it: bandwidth by reading the weights once, arithmetic by the largest product; between kernels a
    layer takes what it took in the step of one token, which is thereby no prediction.
    """
    (part,) = split_among(model, 1, 1)[0]
    one = record["results"][0]
    read_gb = 2 * (part.held.matrices + part.output.matrices) / one["reading"] / 1e6
    tflops = _read("kernels")["machine"]["matmul_gflop"] / 1e3
    layer_us = one["other"] / part.held.layers * 1e3
    return Device(memory_gb=24, read_gb=read_gb, tflops={"bfloat16": tflops}, link_gb=read_gb, layer_us=layer_us, source="measured here")


def _steps() -> Iterator[dict[str, Any]]:
    """Passes by their tokens, in rows of at most 8."""
    for name in STEPS:
        record = _read(name)
        model = without_weights(record["model"])
        cluster = Cluster(split_among(model, 1, 1), _machine(model, record), "bfloat16", model.hidden_size, 2)
        for r in record["results"]:
            rows = -(-r["tokens"] // r["tokens_per_row"])
            terms = cluster.pass_terms(Pass(rows, r["tokens"] / rows, r["context"]))
            told = {"linear": sum(terms[n] for n in ("linear layers", "output layer")), "attention": terms["attention"]}
            parts = {name: 1e3 * seconds for name, seconds in told.items()}
            yield {"model": record["model"], "tokens": r["tokens"], "ms": r["milliseconds"], "predicted_ms": 1e3 * sum(terms.values())} | {
                f"{part}_ms": [r[part], parts[part]] for part in parts
            }


def _ranks() -> dict[str, Any]:
    """One engine on all cores, and two ranks with half of the machine each; gathers are taken to cost what their bytes do."""
    record, told = _read("ranks"), {}
    model = without_weights(record["shape"])
    whole = _machine(model, _read("step"))
    half = {"read_gb": whole.read_gb / 2, "tflops": {name: rate / 2 for name, rate in whole.tflops.items()}}
    for size, device in ((1, whole), (record["size"], whole.model_copy(update=half))):
        cluster = Cluster(split_among(model, size, 1), device, "bfloat16", model.hidden_size, 2)
        told[size] = 1e3 * sum(cluster.pass_terms(Pass(record["batch"], 1, RANKS_CONTEXT)).values())
    gathers = len(split_among(model, record["size"], 1)[0][0].held.gathers)
    return {
        "one_ms": [record["one_ms"], told[1]],
        "ranks_ms": [record["ranks_ms"], told[record["size"]]],
        "gathers": gathers,
        "rounds": [[one, ranks] for one, ranks, _ in record["rounds"]],
    }


def scylla() -> Record:
    """Table 5. The share of the bandwidth that is reached is fitted to plain decoding at batch 1, and tokens a step of both drafters to
    their cells at batch 1; all other cells are predicted, with all of the published arithmetic.
    """
    model, published = without_weights("qwen2.5-72b"), read_devices()["h800"]
    parts = split_among(model, SCYLLA_RANKS, 1)

    def cluster(bandwidth: float) -> Cluster:
        device = published.model_copy(update={"read_gb": published.read_gb * bandwidth})
        return Cluster(parts, device, "bfloat16", model.hidden_size, 2)

    bandwidth = _solved(lambda x: cluster(x).speed(1, SCYLLA_CONTEXT).tokens_per_second, PUBLISHED[1][0])
    used, lines = cluster(bandwidth), list[dict[str, Any]]()
    eagle = _split(_drafting(EAGLE_2, model, 60))
    eagle = replace(eagle, emitted=_tokens(used, eagle, PUBLISHED[1][1]))
    trees = {n: _split(_drafting(EAGLE_2 | {"method": "scylla"}, model, n)) for n in range(1, 61)}
    accepted = Acceptance(_tokens(used, trees[60], PUBLISHED[1][2]), 60, True)
    trees = {n: replace(drafting, emitted=accepted.at(n)) for n, drafting in trees.items()}
    for batch, cells in PUBLISHED.items():
        chosen, adaptive = used.fastest(batch, SCYLLA_CONTEXT, [trees[n] for n in SCYLLA_NODES])
        by_law = min(60, round(published_k_opt(batch)))
        told = [used.speed(batch, SCYLLA_CONTEXT, drafting).tokens_per_second for drafting in (None, eagle, trees[by_law])]
        told.append(adaptive.tokens_per_second)
        lines.append({"batch": batch, "published": cells, "predicted": told, "by_law": by_law, "drafted": chosen.drafted})
    predicted = [line for line in lines if line["batch"] != 1]  # at batch 1 there is nothing but what was fitted
    errors = [[abs(line["predicted"][i] / line["published"][i] - 1) for line in predicted] for i in range(3)]
    return {
        "bandwidth": bandwidth,
        "tokens_per_step": [eagle.emitted, accepted.tokens],
        "lines": lines,
        "error": [statistics.median(own) for own in errors],
        "largest_error": [max(own) for own in errors],
        "gib_needed": _gibibytes(parts, 64),
        "gib": SCYLLA_RANKS * published.memory_bytes / 2**30,
    }


def _tokens(used: Cluster, drafting: DraftingCost, speed: float) -> float:
    """Tokens a step with which one row has this speed."""
    return speed * used.speed(1, SCYLLA_CONTEXT, drafting).seconds


def _gibibytes(parts: Any, rows: int) -> float:
    """Weights, and keys and values of so many rows, on all devices."""
    return float(sum(part.numbers * 2 + rows * SCYLLA_CONTEXT * part.held.kv_bytes for ranks in parts for part in ranks) / 2**30)


def _drafting(spec: dict[str, Any], model: PaperModel, nodes: int) -> DraftingCost:
    return drafting_of(
        SpeculativeConfig(**spec | {"num_speculative_tokens": nodes}), model, Acceptance(2.0, nodes, True), nodes, "bfloat16"
    )


def _split(drafting: DraftingCost) -> DraftingCost:
    """The head shared out among the ranks, as published systems have it."""
    levels = (
        replace(level, held=replace(level.held, matrices=level.held.matrices // SCYLLA_RANKS, features=level.held.features // SCYLLA_RANKS))
        for level in drafting.levels
    )
    return replace(drafting, levels=tuple(levels))


def _solved(value: Any, wanted: float) -> float:
    """The share between a hundredth and 1 at which a rising function has the wanted value, or 1."""
    low, high = 0.01, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < wanted else (low, middle)
    return high
