"""Cosines and sines of rotary embeddings, looked up by position instead of computed in every pass.

A rotary embedding of `transformers` makes them by a dozen small operations, which cost a small draft model as much as its layers. Where
they depend on the position alone, the module's own forward fills a table once, and each pass reads its rows: the same bits, by trial.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.model.patches import PatchedForward
from echelon.ops import devices

TABULATED = 4096  # positions; a pass that has a later one computes its own
BY_LENGTH = {"dynamic", "longrope"}  # kinds whose frequencies depend on how long the text is
TRIALS = (1, 3, 16, 250)  # positions of a pass
Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _rotary(forward: Forward, dtype: torch.dtype, cosines: Tensor, sines: Tensor, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, R] for x [1, T, d] and positions int [1, T], by table where x is of `dtype`."""
    if x.dtype != dtype or position_ids.ndim != 2 or int(position_ids.numpy().max(initial=0)) >= len(cosines):
        return forward(x, position_ids)
    return torch.embedding(cosines, position_ids), torch.embedding(sines, position_ids)


def tabulate_rotary(model: nn.Module) -> None:
    """Give the rotary embeddings of a model on the CPU their tables, where these are seen to serve; they may be read under autograd."""
    first = next(model.parameters(), torch.empty(0))
    if first.device.type != "cpu" or not devices.has_kernels(first):
        return
    for module in _tabulated(model):
        with torch.inference_mode(False), torch.no_grad():
            own = PatchedForward(_rotary, module.forward, first.dtype, *_rows(module, first.dtype, num_positions(module)))
            if all(_is_same(module, own, first.dtype, count) for count in TRIALS):
                module.forward = own


def num_positions(module: Any) -> int:
    """Positions that the table of a rotary embedding has."""
    return min(TABULATED, getattr(module, "max_seq_len_cached", TABULATED))


def table_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the tables that a model will have whose passes compute in `dtype`."""
    return sum(num_positions(m) * row.nbytes for m in _tabulated(model) for row in _rows(m, dtype, 1))


def tables_of(model: nn.Module) -> list[Tensor]:
    """The tables [P, R] of a model that is served, for its first P positions."""
    forwards = [vars(m).get("forward") for m in model.modules()]
    return [table for f in forwards if isinstance(f, PatchedForward) and f.func is _rotary for table in f.args[2:]]


def _tabulated(model: nn.Module) -> list[Any]:
    """Rotary embeddings whose cosines and sines depend on the position alone."""
    return [
        m
        for m in model.modules()
        if isinstance(getattr(m, "inv_freq", None), Tensor)
        and getattr(m, "rope_type", None) not in BY_LENGTH
        and not isinstance(getattr(m, "rope_type", None), dict)
        and "forward" not in vars(m)
        and list(inspect.signature(m.forward).parameters) == ["x", "position_ids"]
    ]


def _rows(module: Any, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Cosines and sines [count, R] of the first positions."""
    device = module.inv_freq.device
    x, positions = torch.empty(1, 1, 1, dtype=dtype, device=device), torch.arange(count, device=device)[None]
    return [table[0].contiguous() for table in module.forward(x, positions)]


def _is_same(module: Any, own: Forward, dtype: torch.dtype, count: int) -> bool:
    """Whether a pass over some positions, which lie apart, has the same bits by table."""
    x, positions = torch.empty(1, 1, 1, dtype=dtype), torch.arange(num_positions(module))
    chosen = positions[:: max(1, len(positions) // count)][None]
    return all(torch.equal(a, b) for a, b in zip(module.forward(x, chosen), own(x, chosen), strict=True))
