"""One token for each of many rows of logits, by the rule of `sampling.Sampler`. A row's token depends on that row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.errors import EchelonError, row_error
from echelon.ops import devices
from echelon.sampling import Sampler


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
    failed: dict[int, EchelonError] = {}
    # the host takes what a device has no token for, and what requests change
    processed = {i: _processed(row, i, failed) for i, row in enumerate(rows) if tokens.get(i, -1) < 0}
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
