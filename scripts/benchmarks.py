"""docs/benchmarks.md with its plots: `python scripts/benchmarks.py [--small] [--output FOLDER] [PREFIX ...]`.

A cell is one batch size of one experiment. Its results go to evidence/benchmarks/CELL.json, with settings, commit and machine, as soon as
they are there; a cell that was measured with the same settings on the same machine is not measured again (delete its file to repeat it), so
that a run which was cut off goes on where it was. The document is written anew from all cells at the end of every run.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks_document import write_document
from transformers import OPTConfig, OPTForCausalLM

from echelon import LLM, ConfigError, SamplingParams, SpeculativeConfig
from echelon.bench.inflate import inflate, plan_growth
from echelon.bench.latency import measure_latency
from echelon.bench.prefill import PrefilledRun, Prefix, read_prefixes
from echelon.bench.replayed import rescaled
from echelon.bench.report import write_json
from echelon.bench.throughput import Method, default_methods, environment, measure
from echelon.bench.verify import Request, verify_model
from echelon.bench.workloads import code_prompts
from echelon.cli.verify import as_json as verified_as_json
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.target.loading import LoadedModel, adopt_model, load_model, load_plain

ROOT = Path(__file__).parents[1]
PADDINGS = ("padded", "padded-inputs", "padded-kv", "unpadded")  # EMS-SD's columns: vanilla, unpad KV only, unpad inputs only, both
REALIGNMENTS = ("unpadded", "realign", "same-length")
LAWS = (2.0, 3.0, 4.2)  # tokens_per_step that the measured histogram is moved to


@dataclass(frozen=True)
class Size:
    """How large everything is. `opt` and `opt_draft`: hidden, feed-forward, layers, heads. A model grows to `parameters`; 0: as it is."""

    opt: tuple[int, int, int, int] = (2048, 8192, 24, 32)
    opt_draft: tuple[int, int, int, int] = (768, 3072, 12, 12)
    opt_vocab: int = 50272
    pair_parameters: int = 1_100_000_000
    realign_parameters: int = 500_000_000
    table_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 24)
    realign_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    latency_batches: tuple[int, ...] = (1, 2, 4, 8)
    gain_batches: tuple[int, ...] = (1, 8, 16)
    prompt_tokens: int = 512
    short_prompt_tokens: int = 128
    gain_prompt_tokens: int = 256
    table_tokens: int = 64
    gain_tokens: int = 128
    realign_tokens: int = 48
    latency_tokens: int = 32
    latency_requests: int = 32
    histogram_prompts: int = 128
    equality_prompts: int = 16
    rounds: int = 2


SMALL = Size(
    opt=(64, 128, 2, 2),
    opt_draft=(64, 64, 1, 2),
    opt_vocab=512,
    pair_parameters=0,
    realign_parameters=0,
    table_batches=(1, 2),
    realign_batches=(2,),
    latency_batches=(2,),
    gain_batches=(2,),
    prompt_tokens=24,
    short_prompt_tokens=16,
    gain_prompt_tokens=24,
    table_tokens=10,
    gain_tokens=10,
    realign_tokens=8,
    latency_tokens=6,
    latency_requests=6,
    histogram_prompts=8,
    equality_prompts=2,
    rounds=1,
)


class Models:
    """Everything that several cells need, made when first asked for; one large model at a time."""

    def __init__(self, size: Size, scratch: Path) -> None:
        self.size, self.scratch = size, scratch
        self._large: tuple[str, Any] = ("", None)

    def _held(self, name: str, make: Callable[[], Any]) -> Any:
        if self._large[0] != name:
            self._large = ("", None)  # free the other one first
            self._large = (name, make())
        return self._large[1]

    @cached_property
    def target(self) -> LoadedModel:
        return load_model(str(TARGET))

    @cached_property
    def draft(self) -> LoadedModel:
        return load_model(str(DRAFT))

    def grown(self, parameters: int) -> LoadedModel:
        """The embedded target at this size, with its own function."""
        if not parameters:
            return self.target
        plain, tokenizer = load_plain(str(TARGET))
        return adopt_model(inflate(plain, plan_growth(plain, parameters)), tokenizer, f"embedded target at {parameters / 1e9:.1f} B")

    def opt(self) -> tuple[LoadedModel, LoadedModel, list[list[int]], list[Prefix]]:
        """Random bfloat16 weights in OPT's shapes, prompts of half to all of `prompt_tokens` random tokens, and their keys and values."""

        def make() -> Any:
            target, draft = (adopt_model(random_opt(shape, self.size), None, "OPT shape") for shape in (self.size.opt, self.size.opt_draft))
            rng, longest = np.random.default_rng(0), self.size.prompt_tokens
            lengths = rng.integers(longest // 2, longest + 1, max(self.size.table_batches))
            prompts = [rng.integers(5, self.size.opt_vocab, n).tolist() for n in lengths]
            return target, draft, prompts, read_prefixes(target, prompts)

        return self._held("opt", make)

    def pair(self) -> tuple[LoadedModel, LoadedModel, list[list[int]], list[Prefix]]:
        """The grown pair, prompts of half to all of `prompt_tokens` tokens of held-out source, and their keys and values."""

        def make() -> Any:
            target = self.grown(self.size.pair_parameters)
            prompts = self.source(target, max(self.size.table_batches), self.size.prompt_tokens)
            return target, self.draft, prompts, read_prefixes(target, prompts)

        return self._held("pair", make)

    def realigned(self) -> LoadedModel:
        return self._held("realigned", lambda: self.grown(self.size.realign_parameters))

    @staticmethod
    def source(target: LoadedModel, count: int, longest: int, is_ragged: bool = True) -> list[list[int]]:
        prompts = code_prompts(target.tokenizer, held_out_files(), count, longest)
        lengths = np.random.default_rng(1).integers(longest // 2, longest + 1, count)
        return [p[-n:] for p, n in zip(prompts, lengths, strict=True)] if is_ragged else prompts

    def law(self, name: str, entries: list[list[float]]) -> str:
        """The path of a histogram file, as `replay` takes it."""
        return str(write_json(self.scratch / f"law-{name}.json", entries))


def random_opt(shape: tuple[int, int, int, int], size: Size) -> OPTForCausalLM:
    hidden, feed_forward, layers, heads = shape
    config = OPTConfig(
        vocab_size=size.opt_vocab,
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OPTForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


class Bench:
    """The cells: name → what measures it. Cells of one model stand together, so that it is built once."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.models = Models(size, folder / "laws")

    @property
    def cells(self) -> dict[str, Callable[[], dict[str, Any]]]:
        size = self.size
        return {
            "histogram": self.histogram,
            **{f"table-opt-{b:02d}": lambda b=b: self.opt_table(b) for b in size.table_batches},
            **{f"table-pair-{b:02d}": lambda b=b: self.pair_table(b) for b in size.table_batches},
            **{f"gain-{b:02d}": lambda b=b: self.gain(b) for b in size.gain_batches},
            **{
                f"realign-{kind}-{b:02d}": lambda b=b, k=kind: self.realign(k, b)
                for kind in ("random", "equal")
                for b in size.realign_batches
            },
            **{f"latency-{b:02d}": lambda b=b: self.latency(b) for b in size.latency_batches},
            "equality": self.equality,
        }

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def histogram(self) -> dict[str, Any]:
        """What LLMA and the draft model draft and accept on the embedded pair: held-out source, greedy."""
        target, size = self.models.target, self.size
        prompts = code_prompts(target.tokenizer, held_out_files(), size.histogram_prompts, size.short_prompt_tokens)
        found = {}
        for method in default_methods()[1:]:
            llm = LLM(target, method.config, self.models.draft, max_num_seqs=32)
            llm.generate(prompts, self.params(size.table_tokens))
            found[method.name] = llm.stats.histogram()
        return {"histograms": found}

    def measured(self) -> dict[str, list[list[float]]]:
        return json.loads((self.folder / "histogram.json").read_text("utf-8"))["histograms"]

    def opt_table(self, batch: int) -> dict[str, Any]:
        """EMS-SD's Table 2 on random weights: acceptance replayed, as measured and moved to other means."""
        target, draft, prompts, prefixes = self.models.opt()
        measured = self.measured()
        laws = {"replay LLMA": measured["LLMA"]} | {f"replay {t}": rescaled(measured["LLMA"], t) for t in LAWS}
        paths = {name: self.models.law(name.replace(" ", "-"), entries) for name, entries in laws.items()}
        drafted = SpeculativeConfig(
            method="replay", num_speculative_tokens=4, replay_histogram=self.models.law("draft", measured["draft model"])
        )
        longest = self.size.prompt_tokens + self.size.table_tokens * 8  # as EMS-SD reserves: every step may leave 7 dead slots
        runs = [PrefilledRun(Method("plain", None), target, None, prefixes, longest)]
        for strategy in PADDINGS:
            for name, path in paths.items():
                method = Method(name, {"method": "replay", "num_speculative_tokens": 7, "replay_histogram": path}, strategy)
                runs.append(PrefilledRun(method, target, None, prefixes, longest))
            method = Method("replay, draft model", default_methods()[2].config, strategy)
            runs.append(PrefilledRun(method, target, draft, prefixes, longest, drafted))
        return self._table(target, prompts[:batch], runs)

    def pair_table(self, batch: int) -> dict[str, Any]:
        """The same on the grown pair, where drafts are real and texts can be compared."""
        target, draft, prompts, prefixes = self.models.pair()
        longest = self.size.prompt_tokens + self.size.table_tokens * 8
        methods = [Method("plain", None), *(Method(m.name, m.config, s) for s in PADDINGS for m in default_methods()[1:])]
        return self._table(target, prompts[:batch], [PrefilledRun(m, target, draft, prefixes, longest) for m in methods])

    def _table(self, target: LoadedModel, prompts: list[list[int]], runs: list[PrefilledRun]) -> dict[str, Any]:
        params = self.params(self.size.table_tokens)
        results = measure(target, None, [], prompts, params, len(prompts), self.size.rounds, [], said, runs)
        return {"results": [asdict(r) for r in results]}

    def gain(self, batch: int) -> dict[str, Any]:
        """What speculation brings where places never stay empty: code continuation on the grown pair, rows enter as others finish."""
        target, draft = self.models.pair()[:2]
        prompts = self.models.source(target, max(2 * batch, 8), self.size.gain_prompt_tokens, is_ragged=False)
        params = self.params(self.size.gain_tokens)
        results = measure(target, draft, default_methods(), prompts, params, batch, self.size.rounds, [], said)
        return {"results": [asdict(r) for r in results]}

    def realign(self, kind: str, batch: int) -> dict[str, Any]:
        """EQSPEC, EXSPEC and ours with the draft model: rows enter as others finish, prompts of random or of equal lengths."""
        target = self.models.realigned()
        prompts = self.models.source(target, max(3 * batch, 8), self.size.short_prompt_tokens, is_ragged=kind == "random")
        methods = [Method("plain", None), *(Method("draft model", default_methods()[2].config, s) for s in REALIGNMENTS)]
        params = self.params(self.size.realign_tokens)
        results = measure(target, self.models.draft, methods, prompts, params, batch, self.size.rounds, [], said)
        return {"results": [asdict(r) for r in results]}

    def latency(self, batch: int) -> dict[str, Any]:
        """Their Table 4: requests that arrive at random, at 80 % of what ours serves."""
        target = self.models.realigned()
        prompts = self.models.source(target, self.size.latency_requests, self.size.short_prompt_tokens)
        methods = [Method("draft model", default_methods()[2].config, s) for s in REALIGNMENTS]
        params = self.params(self.size.latency_tokens)
        results = measure_latency(target, self.models.draft, methods, prompts, params, batch, (0.8,), on_run=said)
        return {"latencies": [asdict(r) for r in results]}

    def equality(self) -> dict[str, Any]:
        """Exact and partial match with plain decoding at batch 1, in bfloat16."""
        prompts = self.models.source(self.models.target, self.size.equality_prompts, self.size.short_prompt_tokens)
        drafters = {"draft_model": {"method": "draft_model", "num_speculative_tokens": 4}}
        request = Request(str(TARGET), prompts, drafters, self.size.realign_tokens)
        verified = verify_model(request, ["bfloat16"], list(REALIGNMENTS), self.size.realign_batches, str(DRAFT), has_control=True)
        return {"equality": [verified_as_json(r) for r in verified]}


def said(name: str) -> None:
    print(f"  {name}", flush=True)


def is_done(path: Path, settings: dict[str, Any]) -> bool:
    """Measured with these settings on this machine."""
    if not path.exists():
        return False
    known = json.loads(path.read_text("utf-8"))
    return known["settings"] == settings and known["environment"]["cpu"] == environment()["cpu"]


def run_cells(bench: Bench, prefixes: list[str]) -> None:
    settings = json.loads(json.dumps(asdict(bench.size)))
    chosen = {n: f for n, f in bench.cells.items() if not prefixes or n.startswith(tuple(prefixes))}
    start = time.perf_counter()
    for place, (name, measured) in enumerate(chosen.items(), 1):
        path = bench.folder / f"{name}.json"
        if is_done(path, settings):
            print(f"[{place}/{len(chosen)}] {name}: measured already", flush=True)
            continue
        print(f"[{place}/{len(chosen)}] {name}, {(time.perf_counter() - start) / 60:.1f} min so far", flush=True)
        before = time.perf_counter()
        try:
            found = measured()
        except ConfigError as error:
            found = {"skipped": str(error)}
        seconds = round(time.perf_counter() - before, 1)
        write_json(path, {"cell": name, "settings": settings, "environment": environment(), "seconds": seconds, **found})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="PREFIX", help="measure only cells whose names begin so")
    parser.add_argument("--small", action="store_true", help="tiny models and runs: does everything work?")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the document; evidence and plots lie below it")
    asked = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("echelon").setLevel(logging.ERROR)  # the document says that replayed texts mean nothing
    bench = Bench(SMALL if asked.small else Size(), asked.output / "evidence" / "benchmarks")
    run_cells(bench, asked.cells)
    print(f"wrote {write_document(asked.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
