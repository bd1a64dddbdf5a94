"""One, two and four ranks say the same, bit for bit: texts and log-probabilities of a fixed sample, whatever drafts and however rows run.

Every cell starts workers, which takes seconds, and so holds many things at once: greedy and drawn rows, prompts in pieces, preemption, a
second turn that finds the first one's prefix; in stages, passes in micro-batches.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import toys
from decoders import decoders

from echelon import LLM, RequestOutput, SamplingParams
from echelon.adaptive.cost_files import CostRecord, write_costs
from echelon.adaptive.cost_table import CostTable, monotone
from echelon.config import RANKS
from echelon.demo import EAGLE, TARGET
from echelon.errors import RankError
from echelon.ops import compiled
from echelon.parallel import stages
from echelon.parallel.runner import SplitRunner
from echelon.parallel.splits import STAGES
from echelon.parallel.stages import FirstStage

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="several ranks need the compiled kernels")
LENGTHS = (1, 3, 17, 40, 64)
NEW = 24


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Checkpoints by name, written when they are first asked for."""
    with TemporaryDirectory(prefix="echelon-ranks-") as path:
        yield Path(path)


def checkpoint(folder: Path, name: str, dtype: torch.dtype) -> str:
    """A toy of this kind, or one that drafts for it."""
    path = folder / f"{name}-{dtype}"
    if not path.exists():
        model = toys.llama(num_hidden_layers=4) if name.startswith("llama") else toys.randomised(*deeper(name), 0, 0.3)
        (toys.noisy_copy(model, 0.05) if name.endswith("/draft") else model).to(dtype).save_pretrained(path)
    return str(path)


def deeper(name: str) -> tuple[Any, Any]:
    """Class and configuration of a toy with layers for four stages."""
    cls, config = decoders(16, 64)[name]
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * 4
    if name == "qwen2":
        config.layer_types[2:], config.sliding_window, config.use_sliding_window = ["sliding_attention"] * 2, 16, True
    return cls, config


class Cell(NamedTuple):
    """What runs, on how many ranks and in how many stages: where a number is negated, with PROVE=1 alone."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    model: str
    spec: dict[str, Any] | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float32
    draft: str | None = None


CELLS = {
    "a draft model's chain": Cell((4, -2), (-2, -4), "llama", {"method": "draft_model", "num_speculative_tokens": 4}, draft="llama/draft"),
    "an EAGLE tree": Cell(
        (2, -4), (2, -4), "demo", {"method": "eagle", "model": str(EAGLE), "num_speculative_tokens": 12, "tree": "dynamic"}
    ),
    "an adaptive copying drafter": Cell((2, -6), (-2, -4), "qwen3", {"method": "ngram", "cost_table": "frozen"}, dtype=torch.bfloat16),
    "a draft model's tree in integers": Cell(
        (2, -4),
        (4, -2),
        "llama",
        {"method": "draft_model", "num_speculative_tokens": 10, "tree": "dynamic", "tree_depth": 3},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        draft="llama/draft",
    ),
    "OPT": Cell((2, -3, -6), (2, -4), "opt", dtype=torch.bfloat16),
    "OPT with narrow embeddings": Cell((-2,), (-2, -3), "opt-350m", {"method": "ngram", "num_speculative_tokens": 3}),
    "windows in half of the layers": Cell((-2,), (-2, -3), "qwen2"),
    "a mixture of experts": Cell((2, -6), (-2, -3), "mixtral", {"method": "ngram", "num_speculative_tokens": 3}, dtype=torch.bfloat16),
}


def made(cell: Cell, folder: Path, **split: int) -> LLM:
    """An engine that reads prompts in pieces."""
    spec = dict(cell.spec) if cell.spec else None
    if spec and "cost_table" in spec:
        spec["cost_table"] = str(frozen_costs(folder))
    if spec and cell.draft:
        spec["model"] = checkpoint(folder, cell.draft, cell.dtype)
    model = str(TARGET) if cell.model == "demo" else checkpoint(folder, cell.model, cell.dtype)
    rows = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_model_len": 128, "block_size": 8}
    return LLM(model, spec, **split, **rows, **cell.settings)


def frozen_costs(folder: Path) -> Path:
    path = folder / "costs.json"
    table = CostTable(step=monotone([1, 8, 64], [10.0, 10.5, 14.0]), key_ms=0.0, place_ms=0.01)
    return write_costs(path, CostRecord(key={"of": "a test"}, table=table))


def sample(llm: LLM, is_demo: bool) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = toys.prompts(LENGTHS, 4096 if is_demo else 80)
    drawn = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
    greedy = {"temperature": 0.0}
    modes: list[dict[str, Any]] = [greedy, drawn, greedy | {"logprobs": 3}, drawn | {"logprobs": 2}, greedy]
    return prompts, [SamplingParams(max_tokens=NEW, seed=50 + i, ignore_eos=True, **mode) for i, mode in enumerate(modes)]


def said(outputs: list[RequestOutput]) -> list[tuple[list[int], Any]]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def two_turns(llm: LLM, is_demo: bool) -> list[Any]:
    """All requests at once; then each text goes on."""
    prompts, params = sample(llm, is_demo)
    first = llm.generate(prompts, params, use_tqdm=False)
    longer = [p + o.outputs[0].token_ids + [1] for p, o in zip(prompts, first, strict=True)]
    second = llm.generate(longer, params, use_tqdm=False)
    return [said(first), said(second)]


ALONE: dict[str, list[Any]] = {}


def alone(name: str, folder: Path) -> list[Any]:
    """The same with one rank and a pool in which everything fits."""
    if name not in ALONE:
        with made(CELLS[name], folder) as llm:
            ALONE[name] = two_turns(llm, CELLS[name].model == "demo")
    return ALONE[name]


RUNS = [
    (name, setting, abs(size))
    for name, cell in CELLS.items()
    for setting, sizes in zip(RANKS, (cell.ranks, cell.stages), strict=True)
    for size in sizes
    if size > 0 or toys.PROVE
]


@pytest.mark.parametrize(("name", "setting", "size"), RUNS)
def test_several_ranks_say_what_one_says(name: str, setting: str, size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FEWEST_TOKENS", 4)
    monkeypatch.setattr(stages, "FEWEST_IN_LANE", 2)
    cell = CELLS[name]
    with made(cell, folder, **{setting: size}) as llm:
        shrink(llm)
        assert isinstance(llm.engine.target, SplitRunner | FirstStage)
        assert two_turns(llm, cell.model == "demo") == alone(name, folder)
        goes_without_trees = setting == STAGES and "tree" in name  # rows that take turns need fewer blocks
        assert llm.stats.num_preemptions > 0 or goes_without_trees
        assert llm.get_counters()["num_prefix_hits"] > 0
        assert not cell.spec or llm.stats.num_accepted_tokens > 0
        pids = llm.engine.target.group.pids
        if size == 4:  # one more thing that needs several workers: with one of them all end
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(RankError, match="rank 2 "):
                two_turns(llm, is_demo=False)
            assert not any(map(psutil.pid_exists, pids))
    assert not any(map(psutil.pid_exists, pids))


def test_layers_run_in_one_call_and_cut_a_long_prompt_alike(tmp_path: Path) -> None:
    """A prompt of more rows than the kernels take at once; every rank's layers gather by themselves."""
    toys.llama(max_position_embeddings=1024).to(torch.bfloat16).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 1 << 22}
    prompts, texts = toys.prompts((700, 5)), []
    for size in (1, 2):
        with LLM(str(tmp_path), tensor_parallel_size=size, **settings) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=1))
            texts.append([(o.outputs[0].token_ids, o.prompt_logprobs) for o in outputs])
            layers = llm.engine.target.loaded.model.forward.compiled  # type: ignore[attr-defined]
            assert len(layers) == 2 and all((layer.ranks is not None) == (size > 1) for layer in layers)
    assert texts[0] == texts[1]


def shrink(llm: LLM) -> None:
    """Take blocks out of every pool until two of the longest rows fit, so that others are preempted."""
    for tables in llm.storage.tables:
        pool: Any = tables
        while tables.num_free > 40:
            pool.pool.allocate()
