"""The thresholds of the compiled sampler where their decisions are close: ties, masses that end on a value, spreads of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.ops import compiled, cpu, reference
from echelon.sampling import Sampler, SamplingParams

pytestmark = pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")
TOP_P = (1e-9, 0.1, 0.5, 0.75, 0.9, 0.95, 0.999999)


def logits_of(kind: str, size: int, rng: np.random.Generator) -> Tensor:
    """Rows [4, size] whose masses are spread in one way or another."""
    shape = (4, size)
    values = {
        "equal": np.zeros(shape),
        "two values": rng.integers(0, 2, shape) * 0.01,
        "few values": rng.integers(-3, 4, shape) * 1.0,
        "halves": -np.log(2.0) * np.minimum(rng.permuted(np.tile(np.arange(size), (4, 1)), axis=1), 60),
        "flat": rng.normal(size=shape) * 0.01,
        "wide": rng.normal(size=shape),
        "peaked": -1.6 * np.log1p(rng.permuted(np.tile(np.arange(size), (4, 1)), axis=1)) + rng.normal(size=shape) * 0.7,
        "far": np.where(rng.random(shape) < 0.01, 0.0, -18.0) + rng.normal(size=shape) * 0.1,
        "forbidden": np.where(rng.random(shape) < 0.5, -np.inf, rng.normal(size=shape)),
        "huge": rng.normal(size=shape) * 1e4,
    }[kind]
    values[:, 0] = np.maximum(values[:, 0], -1.0)  # one at least is allowed
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("size", [2, 255, 256, 257, 3000, 20_011])
@pytest.mark.parametrize("kind", ["equal", "two values", "few values", "halves", "flat", "wide", "peaked", "far", "forbidden", "huge"])
def test_close_decisions_are_those_of_the_definition(kind: str, size: int, family: str) -> None:
    rng = np.random.default_rng(size)
    logits = list(logits_of(kind, size, rng))
    for top_p in TOP_P:
        for top_k, min_p, temperature in ((-1, 0.0, 1.0), (7, 0.0, 0.8), (-1, 0.02, 1.3)):
            params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
            for position in range(3):
                samplers = [Sampler(params, seed=i) for i in range(len(logits))]
                positions = [position * 7 + i for i in range(len(logits))]
                assert cpu.sample_rows(logits, samplers, positions) == reference.sample_rows(logits, samplers, positions)
