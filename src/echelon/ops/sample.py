"""Tokens for many rows of logits, by the rule of `sampling.Sampler`: the one that each row chooses, which depends on that row alone, and
the likeliest next ones as their requests would choose them, which a drafter grows trees from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.errors import EchelonError, row_error
from echelon.ops import devices
from echelon.ops.contract import Float64, Int64
from echelon.sampling import Sampler

CHANGED_AT_ONCE = 64  # rows of logits that requests change, each a copy of its own
NUM_CANDIDATES = 128  # likeliest tokens of a sampled row that noise is drawn for


@dataclass(frozen=True)
class SampleRow:
    """Raw logits float32 [V] (of `raw_rows`) after `tokens` and the drafted `path`, which counts as if it were committed."""

    sampler: Sampler
    logits: NDArray[np.float32] | Tensor
    tokens: Sequence[int]
    path: Sequence[int] = ()

    @property
    def position(self) -> int:
        """The position that the token will have."""
        return len(self.tokens) + len(self.path)


def raw_rows(logits: Tensor) -> NDArray[np.float32] | Tensor:
    """float32 [R, V] as `SampleRow` has them: for NumPy, or a tensor where the device draws."""
    return logits.float() if devices.by_triton(logits) else devices.on_host(logits)


def choose(rows: Sequence[SampleRow], problems: dict[int, EchelonError] | None = None) -> list[int]:
    """Choose the token of every row by its sampler; −1 for a row that has none, where `problems` is given to take the reason.

    Raises
    ------
    EchelonError  a row has no token, and `problems` is not given: its logits hold NaN or infinity, its parameters forbid every token
                  (a `RequestError`), or a logits processor raised
    """
    on_device = {i: row.logits for i, row in enumerate(rows) if isinstance(row.logits, Tensor) and not row.sampler.changes_logits}
    tokens = _drawn(rows, on_device)
    waiting = [i for i in range(len(rows)) if tokens.get(i, -1) < 0]  # what a device has no token for, and what requests change
    changed = [i for i in waiting if rows[i].sampler.changes_logits]
    portions = [[i for i in waiting if not rows[i].sampler.changes_logits]]
    portions += [changed[first : first + CHANGED_AT_ONCE] for first in range(0, len(changed), CHANGED_AT_ONCE)]
    for portion in portions:
        failed: dict[int, EchelonError] = {}
        processed = {i: _processed(rows[i], i, failed) for i in portion}
        if failed and problems is None:
            raise next(iter(failed.values()))
        if problems is not None:
            problems.update(failed)
        tokens |= _drawn(rows, {i: logits for i, logits in processed.items() if i not in failed})
    return [tokens.get(i, -1) for i in range(len(rows))]


def _drawn(rows: Sequence[SampleRow], logits: dict[int, Tensor]) -> dict[int, int]:
    """Index of a row → its token, from logits float32 [V] after everything that changes them; −1 where the largest is not finite."""
    if not logits:
        return {}
    values, chosen = list(logits.values()), [rows[i] for i in logits]
    tokens = devices.backend_of(values[0]).sample_rows(values, [row.sampler for row in chosen], [row.position for row in chosen])
    return dict(zip(logits, tokens, strict=True))


def _processed(row: SampleRow, i: int, failed: dict[int, EchelonError]) -> Tensor:
    """Logits float32 [V] on the host as the request's parameters make them; what prevents a choice is entered in `failed`."""
    raw = devices.on_host(row.logits) if isinstance(row.logits, Tensor) else row.logits
    try:
        return torch.from_numpy(row.sampler.checked(raw, row.tokens, row.path))
    except Exception as error:
        failed[i] = row_error(error)
        return torch.empty(0)


def likeliest(
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    width: int,
    only_ranks: bool = False,
    sharpness: float = 1.0,
) -> tuple[Int64, Float64]:
    """Likeliest tokens, of equals the lower id first, and their log-probabilities: int64 and float64 [M, min(width, V)].

    logits [M, V] have been through everything that changes them; the tokens will have `positions`. A greedy row ranks by probability; with
    `only_ranks` its scores are relative to the likeliest token's, which saves a pass over V. A sampled one ranks by filtered and perturbed
    logits, with the noise that the target will draw with there: as this noise decides what the target chooses, their softmax says how
    sure that is. All scores are those of logits times `sharpness`. The filters see the NUM_CANDIDATES likeliest tokens. A row whose largest
    logit is not finite, or with a NaN, has the score −∞ everywhere.
    """
    width = min(width, logits.shape[-1])
    is_drawn = any(not s.params.is_greedy for s in samplers)
    count = min(max(width, NUM_CANDIDATES) if is_drawn else width, logits.shape[-1])
    return devices.backend_of(logits).likeliest_rows(logits, samplers, positions, width, count, only_ranks, sharpness)


def processed(logits: Tensor, samplers: Sequence[Sampler], texts: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Tensor:
    """float32 [M, V] on the host as each request's own parameters make them, its text and then its drafted path counted; −∞ where these
    fail: the draft ends there, and the target settles it. Without such parameters the logits themselves, where they are.
    """
    if not any(s.changes_logits for s in samplers):
        return logits
    out = logits.cpu().float().clone()
    for i, (sampler, text, path) in enumerate(zip(samplers, texts, paths, strict=True)):
        try:
            out[i] = torch.from_numpy(sampler.checked(out[i].numpy(), text, path))
        except Exception:  # also whatever a request's own processor raises
            out[i] = -torch.inf
    return out
