"""docs/benchmarks.md with its plots: `python -m benchmarks.tables [--small] [--output FOLDER] [PREFIX ...]`.

A cell is one batch size of one experiment. Its record goes to evidence/benchmarks/CELL.json; one that was measured with the same settings
on the same machine is not measured again (delete its file to repeat it). What matters most comes first. The document is written anew at the
end of every run, also of one that is stopped (Ctrl-C), and says which cells it misses.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import transformers

from benchmarks.cells import Cell, Record, Records, chosen, is_here, run_cells, said
from benchmarks.document import write_document
from benchmarks.options import parser_of
from benchmarks.prefill import PrefilledRun
from benchmarks.replayed import AcceptanceHistogram, replay, rescaled
from benchmarks.workloads import (
    PADDINGS,
    ROOT,
    SMALL,
    VERIFIED,
    VERIFIED_TREE,
    Models,
    Size,
    greedy,
    num_realigned,
    source,
    tokens_a_step,
    trained_heads,
)
from echelon import LLM
from echelon.bench.latency import measure_latency
from echelon.bench.throughput import ADAPTIVE, CONFIDENT, DecodingMethod, default_methods, environment, measure
from echelon.bench.verify import VerificationJob, verify_model
from echelon.cli.verify import as_json as verified_as_json
from echelon.demo import DRAFT, TARGET
from echelon.methods import method_names
from echelon.model.load.loading import LoadedModel
from echelon.trees import EAGLE_25

REALIGNMENTS = ("unpadded", "realign", "same-length")
LAWS = (2.0, 3.0, 4.2)  # tokens_per_step that the measured histogram is moved to
HEAD_TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain", "num_speculative_tokens": 4},
    "tree": {"tree": "dynamic", "num_speculative_tokens": 12, "tree_top_k": 4, "tree_depth": 5},
}
VERIFIED_AT = (0.0, 0.8)  # temperatures
EQUAL_TREES: dict[str, dict[str, Any]] = {  # EAGLE-1's list, and EAGLE-2's trees of its size and depth
    "static": {"tree": "static", "num_speculative_tokens": len(EAGLE_25)},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": len(EAGLE_25), "tree_top_k": 10, "tree_depth": 5},
}
HEADS = method_names(needs="head")
VERIFIED_CELLS = {f"verified-{method}": method for method in ("draft_model", *HEADS)}
ROUNDS = 3  # of every method, interleaved


SECONDS = {  # experiment: of a round, and of a row in it
    "histogram": (15, 0),
    "table-opt": (20, 8),
    "table-pair": (17, 7),
    "table-confident": (10, 4),
    **dict.fromkeys(VERIFIED_CELLS, (60, 0)),
    "heads": (60, 12),
    "rescaled": (26, 11),
    "realign-random": (10, 5),
    "realign-equal": (10, 5),
    "equality": (40, 0),
    "latency": (45, 0),
    "gain": (75, 20),
}


class Tables:
    """What the tables are made of; `folder` holds the records."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.folder, self.models = size, folder, Models(size)

    @property
    def cells(self) -> list[Cell]:
        """The most important first."""
        size = self.size
        experiments: list[tuple[str, Callable[..., dict[str, Any]], tuple[int, ...]]] = [
            ("histogram", self.histogram, ()),
            ("table-opt", self.opt_table, size.table_batches),
            ("table-pair", partial(self.pair_table, default_methods()[1:]), size.table_batches),
            ("gain", self.gain, size.gain_batches),
            ("table-confident", partial(self.pair_table, [CONFIDENT]), tuple(b for b in size.gain_batches if b > 1)),
            *((name, partial(self.verified, method), ()) for name, method in VERIFIED_CELLS.items()),
            ("heads", self.heads, (8, 1, 2, 4, 16, 32) if size.pair_parameters else (2,)),
            ("rescaled", self.rescaled_table, size.table_batches),
            ("realign-random", partial(self.realign, True), size.realign_batches),
            ("realign-equal", partial(self.realign, False), size.realign_batches),
            ("equality", self.equality, ()),
            ("latency", self.latency, size.latency_batches),
        ]
        cells: list[Cell] = []
        for name, measured, batches in experiments:
            a_round, a_row = SECONDS[name]
            methods = [VERIFIED_CELLS[name]] if name in VERIFIED_CELLS else self.models.heads if name == "heads" else []
            inputs = trained_heads(methods) if size.pair_parameters else {}
            if not batches:
                cells.append(Cell(name, measured, a_round, inputs))
            cells += [Cell(f"{name}-{b:02d}", partial(measured, b), ROUNDS * (a_round + a_row * b), inputs) for b in batches]
        return cells

    def histogram(self) -> dict[str, Any]:
        """What LLMA and the draft model draft and accept on the embedded pair: held-out source, greedy."""
        target, size = self.models.target, self.size
        prompts = source(target, size.histogram_prompts, size.short_prompt_tokens, is_ragged=False)
        found = {}
        for method in default_methods()[1:]:
            llm = LLM(target, method.config, self.models.draft, max_num_seqs=32)
            llm.generate(prompts, greedy(size.table_tokens))
            found[method.name] = llm.stats.histogram()
        return {"histograms": found}

    def measured(self) -> dict[str, list[list[float]]]:
        """The histograms of the first cell."""
        return dict(json.loads((self.folder / "histogram.json").read_text("utf-8"))["histograms"])

    def opt_table(self, batch: int) -> dict[str, Any]:
        """EMS-SD's Table 2 on random weights: acceptance replayed as it was measured."""
        measured = self.measured()
        target, draft, prompts, prefixes = self.models.opt
        law = AcceptanceHistogram.from_counts(measured["draft model"], "the measured histogram")
        runs = self._replays({"replay LLMA": measured["LLMA"]})
        modelled = [DecodingMethod("replay, draft model", default_methods()[2].config, s, partial(replay, law=law)) for s in PADDINGS]
        runs += [PrefilledRun(m, target, draft, prefixes, self.longest(m.strategy)) for m in modelled]
        return self._table(target, prompts[:batch], runs)

    def rescaled_table(self, batch: int) -> dict[str, Any]:
        """The same with LLMA's histogram moved to other means."""
        measured = self.measured()["LLMA"]
        runs = self._replays({f"replay {t}": rescaled(measured, t) for t in LAWS})
        return self._table(self.models.opt[0], self.models.opt[2][:batch], runs)

    def _replays(self, laws: dict[str, list[list[float]]]) -> list[PrefilledRun]:
        """Plain decoding and every law in every strategy, on the OPT shape."""
        target, _, _, prefixes = self.models.opt
        methods = [DecodingMethod("plain", None)]
        for name, entries in laws.items():
            prepare = partial(replay, law=AcceptanceHistogram.from_counts(entries, name))
            methods += [DecodingMethod(name, default_methods()[1].config, strategy, prepare) for strategy in PADDINGS]
        return [PrefilledRun(m, target, None, prefixes, self.longest(m.strategy)) for m in methods]

    def pair_table(self, drafting: list[DecodingMethod], batch: int) -> dict[str, Any]:
        """The same on the grown pair, where drafts are real and texts can be compared."""
        prompts, prefixes = self.models.pair
        methods = [DecodingMethod("plain", None), *(DecodingMethod(m.name, m.config, s) for m in drafting for s in PADDINGS)]
        runs = [PrefilledRun(m, self.models.grown, self.models.draft, prefixes, self.longest(m.strategy)) for m in methods]
        return self._table(self.models.grown, prompts[:batch], runs)

    def longest(self, strategy: str) -> int:
        """Slots of a row: where keys and values are padded every step may leave 7 dead ones, as EMS-SD reserves."""
        a_step = 8 if strategy in ("padded", "padded-kv") else 1
        return self.size.prompt_tokens + self.size.table_tokens * a_step

    def _table(self, target: LoadedModel, prompts: list[list[int]], runs: list[PrefilledRun]) -> dict[str, Any]:
        return self._measured(target, [], prompts, self.size.table_tokens, len(prompts), runs)

    def gain(self, batch: int) -> dict[str, Any]:
        """What speculation brings where places never stay empty: code continuation on the grown pair, rows enter as others finish."""
        prompts = source(self.models.grown, 4 * batch, self.size.gain_prompt_tokens, is_ragged=False)
        plain, *fixed = default_methods()
        methods = [plain, *ADAPTIVE, *fixed, CONFIDENT]
        return self._measured(self.models.grown, methods, prompts, self.size.gain_tokens, batch)

    def heads(self, batch: int) -> dict[str, Any]:
        """Trained heads as chains and as trees beside the draft model, on the grown pair; rows enter as others finish."""
        target, folders = self.models.with_heads
        prompts = source(target, 2 * batch, self.size.short_prompt_tokens // 2, is_ragged=False)
        trained = [
            DecodingMethod(f"{m}, {t}", {"method": m, "model": folders[m], **shape}) for m in HEADS for t, shape in HEAD_TREES.items()
        ]
        small = [DecodingMethod(f"draft model, {t}", {"method": "draft_model", **shape}) for t, shape in HEAD_TREES.items()]
        methods = [DecodingMethod("plain", None), default_methods()[1], *small, *trained]
        return self._measured(target, methods, prompts, self.size.table_tokens, batch)

    def verified(self, method: str) -> dict[str, Any]:
        """What a step emits by how many tokens it checks, on the embedded target: [temperature, name, tokens, emitted]. Of EAGLE's heads
        also what trees of equal size emit: [temperature, name, static, dynamic].
        """
        size, target = self.size, self.models.target
        asked: dict[str, Any] = {"method": method}
        prompts = source(target, min(32, size.histogram_prompts), size.short_prompt_tokens, is_ragged=False)
        if method == "draft_model":
            shapes = {"draft model, chain": asked, "draft model, tree": asked | VERIFIED_TREE}
        else:
            shapes = {f"{method}, tree": asked | {"model": self.models.trained(method), **VERIFIED_TREE}}

        def emitted(temperature: float, config: dict[str, Any]) -> float:
            return tokens_a_step(target, config, prompts, size.table_tokens, temperature, self.models.draft)

        found = [
            [temperature, name, budget, emitted(temperature, shapes[name] | {"num_speculative_tokens": budget})]
            for name, temperature, budget in product(shapes, VERIFIED_AT, VERIFIED if size.pair_parameters else VERIFIED[:1])
        ]
        if not method.startswith("eagle"):
            return {"verified": found}
        trees = {name: asked | {"model": self.models.trained(method)} | tree for name, tree in EQUAL_TREES.items()}
        return {"verified": found, "trees": [[t, method, *(emitted(t, tree) for tree in trees.values())] for t in VERIFIED_AT]}

    def realign(self, is_ragged: bool, batch: int) -> dict[str, Any]:
        """EQSPEC, EXSPEC and ours with the draft model: rows enter as others finish, prompts of random or of equal lengths."""
        target = self.models.realigned
        prompts = source(target, num_realigned(batch), self.size.short_prompt_tokens, is_ragged)
        methods = [DecodingMethod("plain", None), *(DecodingMethod("draft model", default_methods()[2].config, s) for s in REALIGNMENTS)]
        return self._measured(target, methods, prompts, self.size.realign_tokens, batch)

    def _measured(
        self,
        target: LoadedModel,
        methods: list[DecodingMethod],
        prompts: list[list[int]],
        max_tokens: int,
        batch: int,
        others: Sequence[PrefilledRun] = (),
    ) -> dict[str, Any]:
        results = measure(target, self.models.draft, methods, prompts, greedy(max_tokens), batch, ROUNDS, [], said, others)
        return {"results": [asdict(r) for r in results]}

    def latency(self, batch: int) -> dict[str, Any]:
        """Their Table 4: requests that arrive at random, at other moments in every round, at 80 % of what ours serves."""
        target = self.models.realigned
        prompts = source(target, self.size.latency_requests, self.size.short_prompt_tokens)
        methods = [DecodingMethod("draft model", default_methods()[2].config, s) for s in REALIGNMENTS]
        params = greedy(self.size.latency_tokens)
        rounds = [measure_latency(target, self.models.draft, methods, prompts, params, batch, (0.8,), seed, said) for seed in range(ROUNDS)]
        return {"latencies": [asdict(r) for results in rounds for r in results]}

    def equality(self) -> dict[str, Any]:
        """Exact and partial match with plain decoding at batch 1, in bfloat16."""
        prompts = source(self.models.target, self.size.equality_prompts, self.size.short_prompt_tokens)
        drafters = {"draft_model": {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 4}}
        request = VerificationJob(str(TARGET), prompts, drafters, self.size.realign_tokens)
        verified = verify_model(request, ["bfloat16"], list(REALIGNMENTS), self.size.realign_batches, has_control=True)
        return {"equality": [verified_as_json(r) for r in verified]}


def main(arguments: list[str] | None = None) -> int:
    options = parser_of(
        __doc__,
        {
            "cells": {"nargs": "*", "metavar": "PREFIX", "help": "measure only cells whose names begin so"},
            "--small": {"action": "store_true", "help": "tiny models and runs: does everything work?"},
            "--output": {"type": Path, "default": ROOT / "docs", "help": "folder of the document; evidence and plots lie below it"},
        },
    ).parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tables = Tables(SMALL if options.small else Size(), options.output / "evidence" / "benchmarks")
    cells, where = tables.cells, environment()
    settings = json.loads(json.dumps(asdict(tables.size)))

    def is_current(_: str, record: Record) -> bool:
        return record["settings"] == settings and is_here(record, where)

    try:
        asked = chosen(cells, options.cells)
        found = run_cells(asked, Records(tables.folder), {"settings": settings, "environment": where}, is_current)
        return int(any("failed" in record for record in found.values()))
    except KeyboardInterrupt:
        return 130
    finally:
        print(f"wrote {write_document(options.output, [cell.name for cell in cells], settings)}")


if __name__ == "__main__":
    logging.getLogger("echelon").setLevel(logging.ERROR)  # the document says that replayed texts mean nothing
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` stops a run as Ctrl-C does
    sys.exit(main())
