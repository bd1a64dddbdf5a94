"""Sigmoid and its kin give an element the same bits wherever it lies in a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def test_large_calls_are_not_shared_out_at_odd_places(threads: int) -> None:
    x = torch.randn(3 * PIECE + 8, generator=torch.Generator().manual_seed(0))
    with WholeVectors():
        assert torch.equal(torch.sigmoid(x)[-8:], torch.sigmoid(x[-8:]))


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
