"""Padding told apart from kernels: EMS-SD's Table 2, EQSPEC's overhead and SpecMemo's padded trees where all have one attention.

`python -m benchmarks.alike [--rows N] [--rounds N] [--tokens N] [PREFIX ...]`. Elsewhere strategies besides `unpadded` run on the
framework's attention; here they run on ours (`baselines.padded_blocks`), so that what separates them is padding, and at batch 1, where
there is none, nothing. Static batches of B rows until N rows have been decoded, prompts read once for all, strategies by turns.

opt_bBB         plain decoding and LLMA in every strategy on random weights in the shape of OPT-1.3B; acceptance is replayed so that a step
                emits as many tokens as the published speed at batch 1 takes
realign_bBB     plain decoding, and a draft model of 4 tokens, unpadded, realigned, and in groups of equal length, on the grown pair
windows_b08     how often groups of equal length are found among prompts of one length, by the rows that they are chosen from
trees_HEAD_bBB  chains and trees of EAGLE, Medusa and Clover, unpadded and padded as SpecMemo pads them, on the grown pair
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from benchmarks.cells import Cell, Record, Records, asked_of, run_with_settings, said
from benchmarks.prefill import PrefilledRun, Prefix, decode, read_prefixes
from benchmarks.replayed import AcceptanceHistogram, replay, rescaled
from benchmarks.workloads import EVIDENCE, PADDINGS, Models, Size, greedy, source, trained_heads
from echelon import LLM, ConfigError
from echelon.baselines.strategies import on_our_attention
from echelon.bench.phases import Sums
from echelon.bench.report import table
from echelon.bench.throughput import DecodingMethod, Prompts, Run, ThroughputResult, default_methods, measure
from echelon.model.load.loading import LoadedModel
from echelon.sampling import SamplingParams

BATCHES = (1, 8, 2, 4, 16, 12, 20, 24)
REALIGNED = (1, 4, 8, 16, 32)
TREES_AT = (1, 4, 8)
HEADS = ("eagle", "medusa", "clover")
LAW = 4.2  # tokens a step that 3.94 times the speed of plain decoding takes at batch 1
EXTRA_SLOTS = 32  # slots of a row for the ends of its blocks
WINDOWS = (8, 16, 24, 48, 96)
REALIGNMENTS = ("unpadded", "realign", "same-length")
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain", "num_speculative_tokens": 4},
    "tree": {"tree": "dynamic", "num_speculative_tokens": 12, "tree_top_k": 4, "tree_depth": 5},
}


class AlikeRun(PrefilledRun):
    """A strategy on our attention, over as many static batches of `at_once` rows as its prompts make."""

    def __init__(
        self,
        method: DecodingMethod,
        target: LoadedModel,
        draft: LoadedModel | None,
        prefixes: SequenceOf[Prefix],
        length: int,
        at_once: int,
    ) -> None:
        super().__init__(method, target, draft, prefixes, length + EXTRA_SLOTS)
        self._at_once = at_once

    def run(self, prompts: Prompts, params: SamplingParams) -> Run:
        outputs, seconds, decoded = [], 0.0, Sums()
        llm = self._engine(self._at_once)
        for first in range(0, len(prompts), self._at_once):
            rows = slice(first, first + self._at_once)
            texts, recorder = decode(llm, prompts[rows], params, self._prefixes[rows], first)
            outputs += texts
            seconds += recorder.whole["seconds"]
            decoded += recorder.decode
        self._decode, self._stats = self._decode + decoded, llm.stats
        return Run(outputs, seconds, (decoded["tokens"], decoded["seconds"]))

    def _engine(self, num_rows: int) -> LLM:
        with on_our_attention():
            return super()._engine(num_rows)


class Alike:
    """Models and prompts of all cells, made when first asked for."""

    def __init__(self, size: Size, rows: int, rounds: int, tokens: int) -> None:
        self.size, self.rows, self.rounds, self.tokens = size, rows, rounds, tokens
        size = replace(size, table_batches=(max(map(self.count, BATCHES)),))
        self.models, self._with_head = Models(size, []), {head: Models(size, [head]) for head in HEADS}

    def count(self, batch: int) -> int:
        """Prompts that make whole batches."""
        return -(-self.rows // batch) * batch

    def length(self, strategy: str) -> int:
        """Slots of a row: where keys are padded every step may leave 7 dead ones."""
        return self.size.prompt_tokens + self.tokens * (8 if strategy in ("padded", "padded-kv") else 1)

    @cached_property
    def histogram(self) -> list[list[float]]:
        """What LLMA drafts and accepts on the embedded pair (`benchmarks.tables histogram`)."""
        found = Records(EVIDENCE / "benchmarks").read().get("histogram", {})
        if "histograms" not in found:
            raise ConfigError("acceptance is replayed as it was measured; measure `python -m benchmarks.tables histogram` first")
        return list(found["histograms"]["LLMA"])

    def opt(self, batch: int) -> Record:
        """Every strategy of EMS-SD, on random weights."""
        target, _, prompts, prefixes = self.models.opt
        law = AcceptanceHistogram.from_counts(rescaled(self.histogram, LAW), "the measured histogram")
        drafting = [DecodingMethod("replay LLMA", default_methods()[1].config, s, partial(replay, law=law)) for s in PADDINGS]
        methods = [DecodingMethod("plain", None), *drafting]
        runs = [AlikeRun(m, target, None, prefixes, self.length(m.strategy), batch) for m in methods]
        return self._measured(target, prompts[: self.count(batch)], runs, batch)

    def _measured(self, target: LoadedModel, prompts: Prompts, runs: SequenceOf[AlikeRun], batch: int) -> Record:
        results = measure(target, None, [], prompts, greedy(self.tokens), batch, self.rounds, [], said, runs)
        return {"rows": len(prompts), "results": [asdict(r) for r in results]}

    def realign(self, batch: int) -> Record:
        """EQSPEC and EXSPEC with a draft model; static batches."""
        target = self.models.realigned
        prompts = source(target, self.count(batch), self.size.short_prompt_tokens)
        prefixes = read_prefixes(target, prompts)
        methods = [DecodingMethod("plain", None)]
        methods += [DecodingMethod("draft model", default_methods()[2].config, s) for s in REALIGNMENTS]
        runs = [AlikeRun(m, target, self.models.draft, prefixes, self.length(m.strategy), batch) for m in methods]
        return self._measured(target, prompts, runs, batch)

    def windows(self, batch: int) -> Record:
        """EXSPEC's group rate and speed by the rows that it holds: [window, rate, tokens a second]."""
        target = self.models.realigned
        prompts = source(target, max(self.rows, WINDOWS[-1]), self.size.short_prompt_tokens, is_ragged=False)
        found = []
        for window in WINDOWS:
            settings: dict[str, Any] = {"group_window": window}
            method = DecodingMethod("draft model", default_methods()[2].config, "same-length")
            (result,) = measure(target, self.models.draft, [method], prompts, greedy(self.tokens), batch, 1, [], said, **settings)
            found.append([window, result.group_rate or 0.0, result.decode_median])
        return {"rows": len(prompts), "windows": found}

    def trees(self, head: str, batch: int) -> Record:
        """A head under SpecMemo's padded batching; it reads its prompts, so that nothing is read before."""
        target, folders = self._with_head[head].with_heads
        prompts = source(target, self.count(batch), self.size.short_prompt_tokens)
        own = {"method": head, "model": folders[head]}
        methods = [DecodingMethod("plain", None)]
        methods += [DecodingMethod(name, own | tree, s) for (name, tree), s in product(TREES.items(), ("unpadded", "padded"))]
        results = measure(target, None, methods, prompts, greedy(self.tokens), batch, self.rounds, [], said, refill=False)
        return {"rows": len(prompts), "results": [asdict(r) for r in results]}


def results_of(record: Record) -> list[ThroughputResult]:
    """What the record of a cell holds."""
    return [ThroughputResult(**r) for r in record.get("results", [])]


def as_markdown(records: Mapping[str, Record]) -> str:
    """A line a cell and method: its speed over plain decoding, and unpadded over it."""
    lines: list[tuple[str, ...]] = []
    for name, record in records.items():
        found = results_of(record)
        lines += [(name, f"window {w}", f"{speed:.1f}", "", f"groups {rate:.0%}", "") for w, rate, speed in record.get("windows", [])]
        if not found:
            continue
        plain = next(r.decode_median for r in found if r.method == "plain")
        best = {r.method: r.decode_median for r in found if r.strategy == "unpadded"}
        for r in found:
            speed = f"{r.decode_median:.1f} ({r.decode_median / plain:.2f})"
            padded = f"{r.padded_input_share:.0%}, {r.padded_kv_share:.0%}"
            lines.append((name, r.name, speed, f"{r.tokens_per_step:.2f}", padded, f"{best[r.method] / r.decode_median:.3f}"))
    return table(["cell", "method", "tokens/s (× plain)", "tokens a step", "padded inputs, keys", "unpadded over it"], lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure the cells that have no record of these settings on this processor; 1 if one fails."""
    more: dict[str, dict[str, Any]] = {
        "--rows": {"type": int, "default": 48, "help": "prompts of a cell, at least"},
        "--rounds": {"type": int, "default": 3},
        "--tokens": {"type": int, "default": 128, "help": "new tokens of a row"},
    }
    asked = asked_of(__doc__, "alike", more, arguments)
    alike = Alike(Size(), asked.rows, asked.rounds, asked.tokens)
    cells = [Cell(f"opt_b{b:02d}", partial(alike.opt, b)) for b in BATCHES]
    cells += [Cell(f"realign_b{b:02d}", partial(alike.realign, b)) for b in REALIGNED]
    cells += [Cell("windows_b08", partial(alike.windows, 8))]
    for head, batch in product(HEADS, TREES_AT):
        cells.append(Cell(f"trees_{head}_b{batch:02d}", partial(alike.trees, head, batch), inputs=trained_heads([head])))
    return run_with_settings(asked, cells, {name: getattr(asked, name) for name in ("rows", "rounds", "tokens")}, as_markdown)


if __name__ == "__main__":
    sys.exit(main())
