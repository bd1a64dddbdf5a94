"""Models and prompts that the tables are measured on, each made when it is first asked for."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prefill import Prefix, read_prefixes
from echelon import LLM, ConfigError, SamplingParams
from echelon.bench.inflate import inflate, inflate_with_heads, plan_growth
from echelon.bench.shapes import opt, with_random_weights
from echelon.bench.workloads import code_prompts
from echelon.demo import DRAFT, EAGLE, TARGET, held_out_files
from echelon.heads.checkpoints import build_head, save_head
from echelon.methods import method_names
from echelon.model.load.loading import LoadedModel, adopt_model, load_model, load_plain

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
PADDINGS = ("padded", "padded-inputs", "padded-kv", "unpadded")  # EMS-SD's columns: vanilla, unpad KV only, unpad inputs only, both
TRAINED = ROOT / "build" / "heads"  # `make heads` leaves them there, a folder a method
VERIFIED = (4, 8, 16, 32, 60)  # drafted tokens that the target checks in a step, at most
VERIFIED_TREE: dict[str, Any] = {"tree": "dynamic", "tree_top_k": 10, "tree_depth": 32}
NUM_TEXTS = 4  # random prompts are beginnings of these


@dataclass(frozen=True)
class Beginnings:
    """Prompts that are beginnings of a few random texts, which are read once for many rows: what they hold matters to nobody."""

    texts: list[list[int]]
    prefixes: list[Prefix]

    @classmethod
    def read(cls, target: LoadedModel, texts: list[list[int]], **settings: Any) -> Beginnings:
        """`settings` are the engine's."""
        return cls(texts, read_prefixes(target, texts, **settings))

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        return [self.texts[row % len(self.texts)][:length] for row, length in enumerate(lengths)]

    def of(self, lengths: list[int]) -> list[Prefix]:
        """Keys and values of these prompts, a copy of none."""
        return [self.prefixes[row % len(self.prefixes)].first(length - 1) for row, length in enumerate(lengths)]


def greedy(max_tokens: int) -> SamplingParams:
    """The likeliest tokens, as many for every row, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def tokens_a_step(
    target: LoadedModel,
    config: dict[str, Any],
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float,
    draft: LoadedModel | None = None,
    sharpness: float | None = None,
) -> float:
    """Tokens that a step of a row emits, over all prompts. `sharpness`: of the scores by which dynamic trees grow; None: the engine's own.

    Raises
    ------
    RuntimeError  the drafter failed, so that there were steps without drafts
    """
    llm = LLM(target, config, draft, max_num_seqs=16)
    guard: Any = llm.engine.drafter
    guard.timer.fixed = math.inf  # tokens are counted, and nothing is timed
    if sharpness is not None:
        guard.drafter.growth.sharpness = sharpness
    llm.generate(prompts, greedy(max_tokens).model_copy(update={"temperature": temperature, "seed": 0}))
    check_drafted(llm)
    return llm.stats.tokens_per_step


def check_drafted(llm: LLM) -> None:
    """Raise RuntimeError if the drafter has ever failed: steps without drafts say nothing about it."""
    if faults := llm.stats.drafter_faults:
        raise RuntimeError(f"the drafter failed ({', '.join(faults)}), and steps without drafts say nothing about it; measure again")


def num_realigned(batch: int) -> int:
    """Prompts of a batch whose rows are realigned: some enter as others finish."""
    return max(3 * batch, 8)


def source(target: LoadedModel, count: int, longest: int, is_ragged: bool = True) -> list[list[int]]:
    """`count` prompts of held-out source of `longest` tokens, or of half to all of them."""
    assert target.tokenizer is not None
    prompts = code_prompts(target.tokenizer, held_out_files(), count, longest)
    lengths = np.random.default_rng(1).integers(longest // 2, longest + 1, count)
    return [p[-n:] for p, n in zip(prompts, lengths, strict=True)] if is_ragged else prompts


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


def trained_heads(methods: Iterable[str]) -> dict[str, str]:
    """Digests of those of these heads that `make heads` has trained: inputs of a cell that drafts with them. Without, they are embedded."""
    files = {method: TRAINED / method / "model.safetensors" for method in methods}
    return {method: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for method, file in files.items() if file.exists()}


class Models:
    """Everything that several cells need, made when first asked for, and kept: together the models take about 10 GB. `heads`: by default
    of all methods that train one.
    """

    def __init__(self, size: Size, heads: Iterable[str] | None = None) -> None:
        self.size, self.heads = size, list(method_names(needs="head") if heads is None else heads)
        self._lasting = tempfile.TemporaryDirectory(prefix="echelon-benchmarks-")  # as long as the run
        self.scratch = Path(self._lasting.name)

    @cached_property
    def target(self) -> LoadedModel:
        return load_model(str(TARGET), device="cpu")

    @cached_property
    def draft(self) -> LoadedModel:
        return load_model(str(DRAFT), device="cpu")

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
        """The grown target with an output layer of its own, and the folder of the grown head of each of `heads`.

        Raises
        ------
        ConfigError  a head has not been trained yet
        """
        plain, tokenizer = load_plain(str(TARGET))
        trained = {method: self.trained(method) for method in self.heads}
        grown, folders = inflate_with_heads(plain, self.size.pair_parameters, trained, self.scratch / "heads")
        return adopt_model(grown, tokenizer, "embedded target, untied and grown", keep_weights=False), folders

    def trained(self, method: str) -> str:
        """The folder of the head that `make heads` has trained, of EAGLE the embedded one without; a small run writes an untrained one.

        Raises
        ------
        ConfigError  it has not been trained yet
        """
        if self.size.pair_parameters:
            if not (TRAINED / method / "config.json").exists():
                if method == "eagle":
                    return str(EAGLE)
                raise ConfigError(f"there is no trained head in {TRAINED / method}; `make heads` trains them")
            return str(TRAINED / method)
        plain, _ = load_plain(str(TARGET))
        folder = self.scratch / "untrained" / method
        save_head(build_head(method, plain).to(plain.dtype), folder, plain)
        return str(folder)

    @cached_property
    def opt(self) -> tuple[LoadedModel, LoadedModel, list[list[int]], list[Prefix]]:
        """Random bfloat16 weights in OPT's shapes, prompts of half to all of `prompt_tokens` random tokens, and their keys and values."""
        size = self.size
        target, draft = (with_random_weights(opt(*shape, size.opt_vocab), "OPT shape") for shape in (size.opt, size.opt_draft))
        rng = np.random.default_rng(0)
        texts = rng.integers(5, size.opt_vocab, (NUM_TEXTS, size.prompt_tokens)).tolist()
        lengths = rng.integers(size.prompt_tokens // 2, size.prompt_tokens + 1, max(size.table_batches)).tolist()
        random = Beginnings.read(target, texts)
        return target, draft, random.prompts(lengths), random.of(lengths)

    @cached_property
    def pair(self) -> tuple[list[list[int]], list[Prefix]]:
        """Prompts of half to all of `prompt_tokens` tokens of held-out source, and their keys and values in the grown target."""
        prompts = source(self.grown, max(self.size.table_batches), self.size.prompt_tokens)
        return prompts, read_prefixes(self.grown, prompts)
