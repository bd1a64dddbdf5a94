"""What each stage has of a model, how a pass is cut, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from decoders import decoders
from torch import Tensor

import heads
from echelon import LLM, ConfigError, ModelLoadError, UnsupportedModelError
from echelon.batch import RaggedBatch, Span
from echelon.kv.blocks import BlockTables
from echelon.model.load.loading import load_stage
from echelon.model.pack import pack
from echelon.model.patches.architectures import ARCHITECTURES
from echelon.model.patches.stages import Stage, check_stages
from echelon.ops import compiled
from echelon.parallel import stages
from echelon.parallel.stages import row_ends

needs_kernels = pytest.mark.skipif(not compiled.is_built(), reason="stages need the compiled kernels")


def spans(rng: np.random.Generator, has_trees: bool) -> list[Span]:
    made = []
    for row in range(7):
        count, num_drafted = int(rng.integers(1, 9)), 3 if has_trees and row % 2 else 0
        parents = [-1, -1, 0] if num_drafted else None
        start = int(rng.integers(0, 9))
        text_len = start + count
        made.append(Span(row, start, rng.integers(0, 9, count + num_drafted).tolist(), 1, text_len, num_drafted, parents, min(3, text_len)))
    return made


@pytest.mark.parametrize("has_trees", [False, True])
def test_rows_of_a_batch_are_a_batch(has_trees: bool) -> None:
    """As if they had been packed alone."""
    rng, tables = np.random.default_rng(3), BlockTables(64, 4, 16)
    rows = spans(rng, has_trees)
    for span in rows:
        tables.reserve(span.row, span.start + len(span.tokens))
    whole = pack(rows, tables)
    for first, last in ((0, 7), (0, 1), (2, 5), (6, 7)):
        part, alone = whole.rows(first, last), pack(rows[first:last], tables)
        part.check()
        for name in ("tokens", "positions", "slots", "indptr", "kv_lens", "text_lens", "prompt_lens"):
            got, expected = getattr(part, name), getattr(alone, name)
            assert torch.equal(got, expected) and got.dtype == expected.dtype, name
        assert part.row_parents() == (alone.row_parents() or [[]] * (last - first if has_trees else 0))
        assert len(part.logit_rows) == 0


def test_a_pass_is_cut_between_rows_into_parts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(*counts: int) -> RaggedBatch:
        tables = BlockTables(256, 4, 256)
        for row, count in enumerate(counts):
            tables.reserve(row, count)
        return pack([Span(row, 0, [0] * count, 1, count) for row, count in enumerate(counts)], tables)

    monkeypatch.setattr(stages, "FEWEST_TOKENS", 8)
    assert row_ends(batch(8, 8, 8, 8), 4) == [1, 2, 3, 4]
    assert row_ends(batch(8, 8, 8, 8), 2) == [2, 4]
    assert row_ends(batch(4, 4, 4), 4) == [3]
    assert row_ends(batch(1, 1, 1), 4) == [3]
    assert row_ends(batch(100, 1, 1), 4) == [1, 3]
    assert row_ends(batch(100), 4) == [1]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_layer_is_in_one_stage(size: int) -> None:
    stage = Stage(0, size)
    stage.num_layers = 5
    parts = [stage.layers_of(rank) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(5))
    assert all(parts)


@needs_kernels
def test_a_stage_reads_its_own_layers_alone(tmp_path: Path) -> None:
    """What lies in the tensors of others is not looked at: a NaN there would be refused. Of a vocabulary a worker has nothing."""
    cls, config = decoders(16, 64)["qwen2"]
    config.num_hidden_layers, config.layer_types = 5, ["full_attention"] * 2 + ["sliding_attention"] * 3
    config.sliding_window, config.use_sliding_window = 16, True
    model = toys.randomised(cls, config, 0, 0.3)
    for layer in (0, 3, 4):
        model.model.layers[layer].mlp.up_proj.weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    for rank in (0, 1):
        with pytest.raises(ModelLoadError, match="NaN"):
            load_stage(str(tmp_path), Stage(rank, 2), "auto", None)
    stage = Stage(1, 3)
    worker: Any = load_stage(str(tmp_path), stage, "auto", None).model
    assert stage.layers == range(1, 3)
    assert [layer.self_attn.sliding_window for layer in worker.model.layers] == [None, 16]
    assert worker.get_output_embeddings().weight.shape == (1, config.hidden_size)
    assert not list(worker.get_input_embeddings().parameters())


@needs_kernels
@pytest.mark.parametrize("size", [2, 4] if toys.PROVE else [4])
def test_a_head_reads_what_layers_of_all_stages_have_read(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, as of one rank, in passes of several micro-batches."""

    class Deeper(heads.Deep):
        hidden_state_names = ("layer:0", "layer:1", "layer:2", "layer:3", "last_unnormed", "last")

        def encode(self, features: Tensor, *inputs: Any, **context: Any) -> Tensor:
            return super().encode(torch.cat(features.chunk(6, -1)[2:5], -1), *inputs, **context)

    monkeypatch.setattr(stages, "FEWEST_TOKENS", 4)
    model = toys.llama(num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    seen: list[list[Tensor]] = []
    for count in (1, size):
        settings: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20, "pipeline_parallel_size": count}
        with LLM(str(tmp_path), {"method": "eagle3", "num_speculative_tokens": 6}, draft_head=Deeper(model), **settings) as llm:
            seen.append(fed(llm.engine.target))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def fed(runner: Any) -> list[Tensor]:
    """Logits and hidden states of three passes over four rows."""
    rng, texts, found = np.random.default_rng(7), [0, 0, 0, 0], []
    for most in (30, 5, 2):
        spans = []
        for row, start in enumerate(texts):
            count = int(rng.integers(1, most))
            texts[row] += count
            spans.append(Span(row, start, rng.integers(0, toys.VOCABULARY, count).tolist(), 1, start + count))
            runner.cache.tables.reserve(row, start + count)
        found += [x.clone() for x in runner.run(runner.pack(spans))]
        for row, end in enumerate(texts):
            runner.cache.tables.advance(row, end)
    return found


def test_models_with_and_without_stages() -> None:
    for name, (cls, config) in decoders(8, 16).items():
        if cls in ARCHITECTURES:
            check_stages(cls, config, name, 2)
            with pytest.raises(ConfigError, match=r"= 3 is more than the 2 layers of .*choose at most 2"):
                check_stages(cls, config, name, 3)
        else:
            with pytest.raises(UnsupportedModelError, match=f"pipeline_parallel_size .* not {cls.__name__}"):
                check_stages(cls, config, name, 2)


def test_settings_that_exclude_stages(tmp_path: Path) -> None:
    for settings, match in (
        ({"strategy": "padded"}, "pipeline_parallel_size = 2 belongs to strategy = 'unpadded'"),
        ({"memory": "4GiB"}, "memory is planned for one process, and pipeline_parallel_size = 2"),
        ({"pipeline_parallel_size": 65}, "more than the 64 ranks"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size = 2 and pipeline_parallel_size = 2 are not served together"),
    ):
        with pytest.raises(ConfigError, match=match):
            LLM("nowhere", **({"pipeline_parallel_size": 2} | settings))
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size = 2 splits a model as it is read.*give its folder or hub name"):
        LLM(toys.adopted(toys.llama()), pipeline_parallel_size=2)
    toys.llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="more than the 2 layers"):
        LLM(tmp_path, pipeline_parallel_size=4)
