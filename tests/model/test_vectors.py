"""Sigmoid and its kin give an element the same bits wherever it lies in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from echelon.heads.parts import ResBlock
from echelon.model.load.loading import serve_head
from echelon.model.patches.experts import patch_experts
from echelon.model.patches.packing import Packing
from echelon.model.patches.vectors import PIECE, SENSITIVE, WholeVectors, patch_sensitive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 8, 24, 60, 64])
@pytest.mark.parametrize("function", sorted(SENSITIVE, key=str), ids=lambda f: getattr(f, "__qualname__", str(f)))
def test_an_element_has_its_bits_whatever_shares_the_call(function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(500, width, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    with WholeVectors():
        alone = torch.cat([function(row) for row in x.split(1)])
        for size in (2, 3, 7, 33, 500):
            assert torch.equal(torch.cat([function(rows) for rows in x.split(size)]), alone)
        assert torch.equal(function(x.t()).t(), alone), "strides change nothing"
    assert torch.allclose(alone.float(), function(x).float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", sorted(SENSITIVE, key=str), ids=lambda f: getattr(f, "__qualname__", str(f)))
def test_every_number_of_16_bits_has_its_bits_among_few_and_among_many(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Loops of the framework take two vectors at a time, of up to 32 such numbers each, and the rest one by one."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    with WholeVectors():
        few, many = (torch.cat([function(piece) for piece in x.split(size)]) for size in (32, 64))
    assert torch.equal(few, many)


def test_large_calls_are_not_shared_out_at_odd_places(threads: int) -> None:
    x = torch.randn(3 * PIECE + 8, generator=torch.Generator().manual_seed(0))
    with WholeVectors():
        assert torch.equal(torch.sigmoid(x)[-8:], torch.sigmoid(x[-8:]))


def test_a_row_of_experts_with_a_gate_of_their_own_has_its_bits_among_many(threads: int) -> None:
    """48 and more rows of 1,367 columns are more than one thread computes whole, and two threads share them at odd places."""
    experts: Any = GptOssExperts(GptOssConfig(hidden_size=32, intermediate_size=1367, num_local_experts=2))
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    experts.down_proj.data.zero_()[:, -32:] = torch.eye(32)  # each of the last columns shows
    patch_experts(experts, None, Packing())
    for count in range(48, 512, 32):
        x = torch.randn(count, 32, generator=generator)
        chosen, weights = torch.zeros(count, 1, dtype=torch.long), torch.ones(count, 1)
        together = experts(x, chosen, weights)
        for row in (0, count // 2 - 1, count // 2, count - 1):
            one = slice(row, row + 1)
            assert torch.equal(experts(x[one], chosen[one], weights[one]), together[one])


def test_a_row_of_a_head_has_its_bits_among_many() -> None:
    """Of 40 numbers, which are no whole vectors; what comes out is mostly what SiLU makes of them."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        block = ResBlock(40)
        block.linear.weight.data.normal_(0.0, 10.0, generator=generator)
        serve_head(block.to(dtype))
        x = (0.05 * torch.randn(170, 40, generator=generator)).to(dtype)
        with torch.inference_mode():
            alone = torch.cat([block(row) for row in x.split(1)])
            for count in (17, 170):
                assert torch.equal(block(x[:count]), alone[:count])


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sigmoid()


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


def test_modules_that_name_such_a_function_are_filled() -> None:
    model = nn.Sequential(Scores(), Plain(), nn.SiLU())
    patch_sensitive(model)
    assert ["forward" in vars(m) for m in model] == [True, False, True]
