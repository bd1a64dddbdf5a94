"""The cells of docs/benchmarks.md: what is measured, on which models, and about how long it takes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echelon import LLM, ConfigError, SamplingParams, SpeculativeConfig
from echelon.bench.inflate import inflate, inflate_with_heads, plan_growth
from echelon.bench.latency import measure_latency
from echelon.bench.prefill import PrefilledRun, Prefix, read_prefixes
from echelon.bench.replayed import rescaled
from echelon.bench.report import write_json
from echelon.bench.shapes import opt, with_random_weights
from echelon.bench.throughput import CONFIDENT, DecodingMethod, default_methods, measure
from echelon.bench.verify import VerificationJob, verify_model
from echelon.bench.workloads import code_prompts
from echelon.cli.verify import as_json as verified_as_json
from echelon.config import HEADS
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.heads.checkpoints import build_head, save_head
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain
from echelon.trees import EAGLE_25

PADDINGS = ("padded", "padded-inputs", "padded-kv", "unpadded")  # EMS-SD's columns: vanilla, unpad KV only, unpad inputs only, both
REALIGNMENTS = ("unpadded", "realign", "same-length")
LAWS = (2.0, 3.0, 4.2)  # tokens_per_step that the measured histogram is moved to


TRAINED = Path(__file__).parents[1] / "build" / "heads"  # `make heads` leaves them there, a folder a method
HEAD_TREES = {
    "chain": {"tree": "chain", "num_speculative_tokens": 4},
    "tree": {"tree": "dynamic", "num_speculative_tokens": 12, "tree_top_k": 4, "tree_depth": 5},
}
VERIFIED = (4, 8, 16, 32, 60)  # drafted tokens that the target checks in a step, at most
VERIFIED_TREE = {"tree": "dynamic", "tree_top_k": 10, "tree_depth": 32}
VERIFIED_AT = (0.0, 0.8)  # temperatures
EQUAL_TREES = {  # EAGLE-1's list, and EAGLE-2's trees of its size and depth
    "static": {"tree": "static", "num_speculative_tokens": len(EAGLE_25)},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": len(EAGLE_25), "tree_top_k": 10, "tree_depth": 5},
}
VERIFIED_CELLS = {f"verified-{method}": method for method in ("draft_model", *HEADS)}
OPT_TEXTS = 4  # random prompts are beginnings of these
TWICE_UP_TO = 8  # larger batches have long steps that vary little: one round


@dataclass(frozen=True)
class Size:
    """How large everything is. `opt` and `opt_draft`: hidden, layers, heads. A model grows to `parameters`; 0: as it is.

    Batch sizes stand in the order in which they are measured: those that something is promised for first.
    """

    opt: tuple[int, int, int] = (2048, 24, 32)
    opt_draft: tuple[int, int, int] = (768, 12, 12)
    opt_vocab: int = 50272
    pair_parameters: int = 1_100_000_000
    realign_parameters: int = 500_000_000
    table_batches: tuple[int, ...] = (8, 16, 1, 2, 4, 24)
    realign_batches: tuple[int, ...] = (8, 16, 1, 2, 4)
    latency_batches: tuple[int, ...] = (8, 4, 2, 1)
    gain_batches: tuple[int, ...] = (8, 16, 1)
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


SMALL = Size(
    opt=(64, 2, 2),
    opt_draft=(64, 1, 2),
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
)


class Models:
    """Everything that several cells need, made when first asked for, and kept: together the models take about 10 GB."""

    def __init__(self, size: Size, scratch: Path) -> None:
        self.size, self.scratch = size, scratch  # what is written there lasts as long as the run

    @cached_property
    def target(self) -> LoadedModel:
        return load_model(str(TARGET))

    @cached_property
    def draft(self) -> LoadedModel:
        return load_model(str(DRAFT))

    @cached_property
    def grown(self) -> LoadedModel:
        return self._grown(self.size.pair_parameters)

    @cached_property
    def realigned(self) -> LoadedModel:
        return self._grown(self.size.realign_parameters)

    def _grown(self, parameters: int) -> LoadedModel:
        """The embedded target at this size, with its own function."""
        if not parameters:
            return self.target
        plain, tokenizer = load_plain(str(TARGET))
        grown = inflate(plain, plan_growth(plain, parameters))
        return adopt_model(grown, tokenizer, f"embedded target at {parameters / 1e9:.1f} B", keep_weights=False)

    @cached_property
    def with_heads(self) -> tuple[LoadedModel, dict[str, str]]:
        """The grown target with an output layer of its own, and the folder of the grown head of every method.

        Raises
        ------
        ConfigError  a head has not been trained yet
        """
        plain, tokenizer = load_plain(str(TARGET))
        trained = {method: self.trained(method) for method in HEADS}
        grown, folders = inflate_with_heads(plain, self.size.pair_parameters, trained, self.scratch / "heads")
        return adopt_model(grown, tokenizer, "embedded target, untied and grown", keep_weights=False), folders

    def trained(self, method: str) -> str:
        """The folder of the head that `make heads` has trained; a small run writes an untrained one.

        Raises
        ------
        ConfigError  it has not been trained yet
        """
        if self.size.pair_parameters:
            if not (TRAINED / method / "config.json").exists():
                raise ConfigError(f"there is no trained head in {TRAINED / method}; `make heads` trains them")
            return str(TRAINED / method)
        plain, _ = load_plain(str(TARGET))
        folder = self.scratch / "untrained" / method
        save_head(build_head(method, plain).to(plain.dtype), folder, plain)
        return str(folder)

    @cached_property
    def opt(self) -> tuple[LoadedModel, LoadedModel, list[list[int]], list[Prefix]]:
        """Random bfloat16 weights in OPT's shapes, prompts of half to all of `prompt_tokens` random tokens, and their keys and values.

        Prompts are beginnings of a few texts: what they hold matters to nobody, so it is read once for many rows.
        """
        size = self.size
        target, draft = (with_random_weights(opt(*shape, size.opt_vocab), "OPT shape") for shape in (size.opt, size.opt_draft))
        rng = np.random.default_rng(0)
        texts = rng.integers(5, size.opt_vocab, (OPT_TEXTS, size.prompt_tokens)).tolist()
        read = read_prefixes(target, texts)
        lengths = rng.integers(size.prompt_tokens // 2, size.prompt_tokens + 1, max(size.table_batches)).tolist()
        prompts = [texts[row % OPT_TEXTS][:length] for row, length in enumerate(lengths)]
        return target, draft, prompts, [read[row % OPT_TEXTS].first(length - 1) for row, length in enumerate(lengths)]

    @cached_property
    def pair(self) -> tuple[list[list[int]], list[Prefix]]:
        """Prompts of half to all of `prompt_tokens` tokens of held-out source, and their keys and values in the grown target."""
        prompts = self.source(self.grown, max(self.size.table_batches), self.size.prompt_tokens)
        return prompts, read_prefixes(self.grown, prompts)

    @staticmethod
    def source(target: LoadedModel, count: int, longest: int, is_ragged: bool = True) -> list[list[int]]:
        prompts = code_prompts(target.tokenizer, held_out_files(), count, longest)
        lengths = np.random.default_rng(1).integers(longest // 2, longest + 1, count)
        return [p[-n:] for p, n in zip(prompts, lengths, strict=True)] if is_ragged else prompts

    def law(self, name: str, entries: list[list[float]]) -> str:
        """The path of a histogram file, as `replay` takes it."""
        return str(write_json(self.scratch / f"law-{name}.json", entries))


class Cell(NamedTuple):
    """What measures it, and about how many seconds that takes on two cores with bfloat16 instructions and 50 GB/s."""

    measure: Callable[[], dict[str, Any]]
    seconds: float


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
REPEATED = ("table-opt", "table-pair", "table-confident")  # what something is promised for


def num_rounds(experiment: str, batch: int) -> int:
    return 2 if experiment in REPEATED and batch <= TWICE_UP_TO else 1


class Bench:
    """The cells: name → what measures it, the most important first."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.folder = size, folder
        self._scratch = tempfile.TemporaryDirectory(prefix="echelon-benchmarks-")
        self.models = Models(size, Path(self._scratch.name))

    @property
    def cells(self) -> dict[str, Cell]:
        size = self.size
        experiments: list[tuple[str, Callable[..., dict[str, Any]], tuple[int, ...]]] = [
            ("histogram", self.histogram, ()),
            ("table-opt", self.opt_table, size.table_batches),
            ("table-pair", partial(self.pair_table, "table-pair", default_methods()[1:]), size.table_batches),
            ("gain", self.gain, size.gain_batches),
            ("table-confident", partial(self.pair_table, "table-confident", [CONFIDENT]), tuple(b for b in size.gain_batches if b > 1)),
            *((name, partial(self.verified, method), ()) for name, method in VERIFIED_CELLS.items()),
            ("heads", self.heads, (8, 1, 2, 4, 16, 32) if size.pair_parameters else (2,)),
            ("rescaled", self.rescaled_table, size.table_batches),
            ("realign-random", partial(self.realign, True), size.realign_batches),
            ("realign-equal", partial(self.realign, False), size.realign_batches),
            ("equality", self.equality, ()),
            ("latency", self.latency, size.latency_batches),
        ]
        cells = {}
        for name, measured, batches in experiments:
            a_round, a_row = SECONDS[name]
            for batch in batches:
                cells[f"{name}-{batch:02d}"] = Cell(partial(measured, batch), num_rounds(name, batch) * (a_round + a_row * batch))
            if not batches:
                cells[name] = Cell(measured, a_round)
        return cells

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
        """EMS-SD's Table 2 on random weights: acceptance replayed as it was measured."""
        measured = self.measured()
        target, draft, prompts, prefixes = self.models.opt
        path = self.models.law("draft", measured["draft model"])
        law = SpeculativeConfig(method="replay", num_speculative_tokens=4, replay_histogram=path)
        runs = self._replays({"replay LLMA": measured["LLMA"]})
        for strategy in PADDINGS:
            method = DecodingMethod("replay, draft model", default_methods()[2].config, strategy)
            runs.append(PrefilledRun(method, target, draft, prefixes, self.longest(strategy), law))
        return self._table(target, prompts[:batch], runs, num_rounds("table-opt", batch))

    def rescaled_table(self, batch: int) -> dict[str, Any]:
        """The same with LLMA's histogram moved to other means."""
        measured = self.measured()["LLMA"]
        runs = self._replays({f"replay {t}": rescaled(measured, t) for t in LAWS})
        return self._table(self.models.opt[0], self.models.opt[2][:batch], runs, num_rounds("rescaled", batch))

    def _replays(self, laws: dict[str, list[list[float]]]) -> list[PrefilledRun]:
        """Plain decoding and every law in every strategy, on the OPT shape."""
        target, _, _, prefixes = self.models.opt
        methods = [DecodingMethod("plain", None)]
        for name, entries in laws.items():
            config = {"method": "replay", "num_speculative_tokens": 7, "replay_histogram": self.models.law(name.replace(" ", "-"), entries)}
            methods += [DecodingMethod(name, config, strategy) for strategy in PADDINGS]
        return [PrefilledRun(m, target, None, prefixes, self.longest(m.strategy)) for m in methods]

    def pair_table(self, name: str, drafting: list[DecodingMethod], batch: int) -> dict[str, Any]:
        """The same on the grown pair, where drafts are real and texts can be compared."""
        prompts, prefixes = self.models.pair
        methods = [DecodingMethod("plain", None), *(DecodingMethod(m.name, m.config, s) for m in drafting for s in PADDINGS)]
        runs = [PrefilledRun(m, self.models.grown, self.models.draft, prefixes, self.longest(m.strategy)) for m in methods]
        return self._table(self.models.grown, prompts[:batch], runs, num_rounds(name, batch))

    def longest(self, strategy: str) -> int:
        """Slots of a row: where keys and values are padded every step may leave 7 dead ones, as EMS-SD reserves."""
        a_step = 8 if strategy in ("padded", "padded-kv") else 1
        return self.size.prompt_tokens + self.size.table_tokens * a_step

    def _table(self, target: LoadedModel, prompts: list[list[int]], runs: list[PrefilledRun], rounds: int) -> dict[str, Any]:
        return self._measured(target, [], prompts, self.size.table_tokens, len(prompts), rounds, runs)

    def gain(self, batch: int) -> dict[str, Any]:
        """What speculation brings where places never stay empty: code continuation on the grown pair, rows enter as others finish."""
        prompts = self.models.source(self.models.grown, 4 * batch, self.size.gain_prompt_tokens, is_ragged=False)
        methods = [*default_methods(), CONFIDENT]
        return self._measured(self.models.grown, methods, prompts, self.size.gain_tokens, batch, num_rounds("gain", batch))

    def heads(self, batch: int) -> dict[str, Any]:
        """Trained heads as chains and as trees beside the draft model, on the grown pair; rows enter as others finish."""
        target, folders = self.models.with_heads
        prompts = self.models.source(target, 2 * batch, self.size.short_prompt_tokens // 2, is_ragged=False)
        trained = [
            DecodingMethod(f"{m}, {t}", {"method": m, "model": folders[m], **shape}) for m in HEADS for t, shape in HEAD_TREES.items()
        ]
        small = [DecodingMethod(f"draft model, {t}", {"method": "draft_model", **shape}) for t, shape in HEAD_TREES.items()]
        methods = [DecodingMethod("plain", None), default_methods()[1], *small, *trained]
        return self._measured(target, methods, prompts, self.size.table_tokens, batch, 1)

    def verified(self, method: str) -> dict[str, Any]:
        """What a step emits by how many tokens it checks, on the embedded target: [temperature, name, tokens, emitted]. Of EAGLE's heads
        also what trees of equal size emit: [temperature, name, static, dynamic].
        """
        size, target, asked = self.size, self.models.target, {"method": method}
        prompts = self.models.source(target, min(32, size.histogram_prompts), size.short_prompt_tokens, is_ragged=False)
        if method == "draft_model":
            shapes = {"draft model, chain": asked, "draft model, tree": asked | VERIFIED_TREE}
        else:
            shapes = {f"{method}, tree": asked | {"model": self.models.trained(method), **VERIFIED_TREE}}

        def emitted(temperature: float, config: dict[str, Any]) -> float:
            llm = LLM(target, config, self.models.draft, max_num_seqs=16)
            llm.generate(prompts, self.params(size.table_tokens).model_copy(update={"temperature": temperature, "seed": 0}))
            return llm.stats.tokens_per_step

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
        prompts = self.models.source(target, max(3 * batch, 8), self.size.short_prompt_tokens, is_ragged)
        methods = [DecodingMethod("plain", None), *(DecodingMethod("draft model", default_methods()[2].config, s) for s in REALIGNMENTS)]
        return self._measured(target, methods, prompts, self.size.realign_tokens, batch, 1)

    def _measured(
        self,
        target: LoadedModel,
        methods: list[DecodingMethod],
        prompts: list[list[int]],
        max_tokens: int,
        batch: int,
        rounds: int,
        others: Sequence[PrefilledRun] = (),
    ) -> dict[str, Any]:
        results = measure(target, self.models.draft, methods, prompts, self.params(max_tokens), batch, rounds, [], said, others)
        return {"results": [asdict(r) for r in results]}

    def latency(self, batch: int) -> dict[str, Any]:
        """Their Table 4: requests that arrive at random, at 80 % of what ours serves."""
        target = self.models.realigned
        prompts = self.models.source(target, self.size.latency_requests, self.size.short_prompt_tokens)
        methods = [DecodingMethod("draft model", default_methods()[2].config, s) for s in REALIGNMENTS]
        params = self.params(self.size.latency_tokens)
        results = measure_latency(target, self.models.draft, methods, prompts, params, batch, (0.8,), on_run=said)
        return {"latencies": [asdict(r) for r in results]}

    def equality(self) -> dict[str, Any]:
        """Exact and partial match with plain decoding at batch 1, in bfloat16."""
        prompts = self.models.source(self.models.target, self.size.equality_prompts, self.size.short_prompt_tokens)
        drafters = {"draft_model": {"method": "draft_model", "num_speculative_tokens": 4}}
        request = VerificationJob(str(TARGET), prompts, drafters, self.size.realign_tokens)
        verified = verify_model(request, ["bfloat16"], list(REALIGNMENTS), self.size.realign_batches, str(DRAFT), has_control=True)
        return {"equality": [verified_as_json(r) for r in verified]}


def said(name: str) -> None:
    print(f"  {name}", flush=True)
