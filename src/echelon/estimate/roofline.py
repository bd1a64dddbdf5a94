"""Operations and bytes of a step (Scylla's law, arXiv 2505.07858, Theorem 1.3): what the roofline of a device makes seconds of."""

from __future__ import annotations

import math
from dataclasses import dataclass

LARGEST_K = 4096  # beyond which the law is not followed


@dataclass(frozen=True)
class ModelShape:
    """What decides operations and bytes of a step.

    weights       numbers in all matrices of linear layers
    activations   numbers that go into and out of these, a token
    query_size    sums over layers of query heads × (size of a key + size of a value)
    cache_size    numbers in the keys and values of a token, all layers
    bytes_each    of a number
    """

    weights: int
    activations: int
    query_size: int
    cache_size: int
    bytes_each: int

    def flops(self, batch_size: int, k: float, context: int) -> float:
        """Multiplications and additions of a step of `batch_size` rows with `k` tokens each after `context` others."""
        tokens = batch_size * k
        return 2.0 * tokens * self.weights + 2.0 * tokens * (context + (k + 1) / 2) * self.query_size

    def bytes(self, batch_size: int, k: float, context: int) -> float:
        """Bytes that it moves."""
        cached = batch_size * (context + k) * self.cache_size
        return self.bytes_each * (self.weights + cached + batch_size * k * self.activations)

    def intensity(self, batch_size: int, k: float, context: int) -> float:
        """Operations a byte."""
        return self.flops(batch_size, k, context) / self.bytes(batch_size, k, context)

    def k_opt(self, batch_size: int, context: int, balance: float) -> float:
        """Tokens of a row at which the intensity reaches `balance`; 1 where one does already, infinity where none does."""
        if self.intensity(batch_size, 1, context) >= balance:
            return 1.0
        low, high = 1.0, float(LARGEST_K)
        if self.intensity(batch_size, high, context) < balance:
            return math.inf
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (middle, high) if self.intensity(batch_size, middle, context) < balance else (low, middle)
        return high
