"""A thousand rows of 64 tokens say the same on several ranks, in several stages and on one rank without drafts (PROVE=1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import toys
from decoders import decoders

from echelon import LLM, SamplingParams
from echelon.config import RANKS
from echelon.ops import compiled

pytestmark = pytest.mark.skipif(not toys.PROVE or not compiled.is_built(), reason="PROVE=1, with the compiled kernels")
ROWS, NEW = 1000, 64
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "word_embed_proj_dim": 64}
INTEGERS = {"quantization": "int8", "kv_cache_dtype": "int8"}
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what drafts, and the engine's settings
    "chains": ({"method": "ngram", "num_speculative_tokens": 3}, {}),
    "trees in integers": (
        {"method": "draft_model", "num_speculative_tokens": 8, "tree": "dynamic", "tree_depth": 3, "quantization": "int8"},
        INTEGERS,
    ),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="echelon-rows-") as path:
        yield Path(path)


def checkpoints(folder: Path, name: str) -> tuple[str, str]:
    """A toy of four heads and four layers in bfloat16, and one that drafts for it."""
    paths = folder / name, folder / f"{name}-draft"
    if not paths[0].exists():
        cls, config = decoders(16, 64)[name]
        for key, value in SHAPE.items():
            if hasattr(config, key):
                setattr(config, key, value)
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        model = toys.randomised(cls, config, 0, 0.3)
        for one, path in zip((model, toys.noisy_copy(model, 0.05)), paths, strict=True):
            one.to(torch.bfloat16).save_pretrained(path)
    return str(paths[0]), str(paths[1])


def texts(model: str, spec: dict[str, Any] | None, settings: dict[str, Any]) -> list[Any]:
    """Texts and log-probabilities; two in three rows do not fit at once and are preempted, or wait."""
    rng = np.random.default_rng(11)
    prompts = toys.prompts(rng.integers(1, 60, ROWS).tolist(), 80)
    params = [
        SamplingParams(max_tokens=NEW, ignore_eos=True, seed=i, temperature=0.8 * (i % 2), top_p=0.95, logprobs=2 if i % 5 == 0 else None)
        for i in range(ROWS)
    ]
    rows = {"max_num_seqs": 48, "max_num_batched_tokens": 512, "max_model_len": 256, "block_size": 8}
    with LLM(model, spec, **rows, **settings) as llm:
        for tables in llm.storage.tables:
            pool: Any = tables
            while tables.num_free > 16 * 17:
                pool.pool.allocate()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats.num_preemptions > 0
        assert spec is None or llm.stats.num_accepted_tokens > 0
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "mixtral"])
def test_a_thousand_rows_say_what_they_say_on_one_rank(name: str, drafts: str, folder: Path) -> None:
    model, draft = checkpoints(folder, name)
    spec, settings = DRAFTS[drafts]
    if spec["method"] == "draft_model":
        spec = spec | {"model": draft}
    expected = texts(model, None, settings)
    for setting in RANKS:
        for size in (2, 4):
            assert texts(model, spec, settings | {setting: size}) == expected, (setting, size)
