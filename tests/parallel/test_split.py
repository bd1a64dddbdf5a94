"""What each rank has of a model, and who is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toys
from decoders import decoders
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from echelon import LLM, ConfigError, ModelLoadError, UnsupportedModelError
from echelon.checkpoint.folder import Folder
from echelon.checkpoint.tensors import open_weights
from echelon.model.load.loading import load_share
from echelon.model.patches.architectures import ARCHITECTURES
from echelon.model.patches.split import Parts, Share, check_split, heads_of, part_of, plan_of
from echelon.ops.compiled import is_built


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("columns", [7, 48, 96, 224, 5632, 11008, 32003])
def test_parts_are_all_columns_once_at_the_borders_of_tiles(columns: int, size: int) -> None:
    parts = [part_of(columns, rank, size) for rank in range(size)]
    assert [c for part in parts for c in range(part.first, part.last)] == list(range(columns))
    assert all(part.first < part.last for part in parts)
    if columns >= 32 * size:
        assert all(part.first % 32 == 0 for part in parts)


def test_heads_are_shared_out_and_repeated_where_there_are_too_few() -> None:
    assert [heads_of(64, 8, rank, 4)[:2] for rank in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert [heads_of(16, 2, rank, 4)[:2] for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert [heads_of(8, 1, rank, 2)[:2] for rank in range(2)] == [(0, 8), (0, 8)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"),
    [(4, 2, {1, 2, 4}), (6, 2, {1, 2, 6}), (8, 1, {1, 2, 4, 8}), (12, 3, {1, 3, 6, 12}), (6, 6, {1, 2, 3, 6})],
)
def test_a_number_of_ranks_divides_the_heads(heads: int, kv_heads: int, fitting: set[int]) -> None:
    config = LlamaConfig(hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    for size in range(1, heads + 2):
        if size in fitting:
            check_split(config, "toy", size)
        else:
            with pytest.raises(ConfigError, match=f"choose {', '.join(map(str, sorted(fitting)))}"):
                check_split(config, "toy", size)


def test_models_with_and_without_a_plan() -> None:
    for name, (cls, config) in decoders(8, 16).items():
        if cls in ARCHITECTURES:
            assert any(kind == "rowwise" for kind in plan_of(cls, config).values()), name
        else:
            with pytest.raises(UnsupportedModelError, match=cls.__name__):
                plan_of(cls, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rows_of_a_rank_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    """What lies in the rows of others is not looked at: a NaN there would be refused."""
    whole = torch.randn(700, 300, generator=torch.Generator().manual_seed(0))
    whole[:100], whole[400:] = torch.nan, torch.nan
    save_file({"weight": whole, "bias": whole[:, 0].clone()}, tmp_path / "model.safetensors")
    with open_weights(Folder.locate(str(tmp_path), "model"), ["model.safetensors"]) as weights:
        for name, expected in (("weight", whole), ("bias", whole[:, 0])):
            got = replace(weights.tensors[name], rows=(100, 400)).read(dtype)
            assert got.shape == expected.shape
            assert torch.equal(got[100:400], expected[100:400].to(dtype))
            with pytest.raises(ModelLoadError, match="NaN"):
                weights.tensors[name].read(dtype)


def test_settings_that_exclude_several_ranks() -> None:
    for settings, match in (
        ({"strategy": "padded"}, "tensor_parallel_size = 2 belongs to strategy = 'unpadded'"),
        ({"memory": "4GiB"}, "memory is planned for one process"),
        ({"tensor_parallel_size": 65}, "more than the 64 ranks"),
    ):
        with pytest.raises(ConfigError, match=match):
            LLM("nowhere", **({"tensor_parallel_size": 2} | settings))
    with pytest.raises(ConfigError, match="give its folder or hub name"):
        LLM(toys.adopted(toys.llama()), tensor_parallel_size=2)


def test_who_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    toys.llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="tensor_parallel_size = 3 does not divide the 4 attention heads"):
        LLM(tmp_path / "llama", tensor_parallel_size=3)
    cls, config = decoders(8, 16)["gpt2"]
    toys.randomised(cls, config, 0, 0.3).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="not GPT2LMHeadModel"):
        LLM(tmp_path / "gpt2", tensor_parallel_size=2)


class Slot:
    """Stands for the way between ranks: what is gathered lies in one place, and belongs to nobody."""

    inside = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.is_connected, self.held = rank, size, False, torch.empty(0)

    def gathered(self, own: Tensor, parts: Parts) -> Tensor:
        self.held = own.new_zeros(*own.shape[:-1], parts[self.rank].whole)
        self.held[..., parts[self.rank].first : parts[self.rank].last] = own
        return self.held

    def gathered_by_first(self, own: Tensor, parts: Parts) -> Tensor:
        return self.gathered(own, parts)


@pytest.mark.skipif(not is_built(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("rank", [0, 1])
def test_logits_are_copied_on_the_rank_that_reads_them(rank: int, tmp_path: Path) -> None:
    toys.llama().save_pretrained(tmp_path)
    exchange = Slot(rank, 2)
    output = load_share(str(tmp_path), Share(exchange), "auto", None).model.get_output_embeddings()
    exchange.is_connected = True
    logits = output(torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(logits, exchange.held) and bool(logits.any())
    assert (logits.data_ptr() == exchange.held.data_ptr()) == (rank == 1)
