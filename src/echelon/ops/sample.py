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
class Place:
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
    """float32 [R, V] as places have them: for NumPy, or a tensor where the device draws."""
    return logits.float() if devices.by_triton(logits) else devices.on_host(logits)


def choose(places: Sequence[Place], problems: dict[int, EchelonError] | None = None) -> list[int]:
    """The sampler's own token at every place; −1 at a place that has none, where `problems` is given to take the reason.

    Raises
    ------
    EchelonError  a place has no token, and `problems` is not given: its logits hold NaN or infinity, its parameters forbid every token
                  (a `RequestError`), or a logits processor raised
    """
    on_device = {i: p.logits for i, p in enumerate(places) if isinstance(p.logits, Tensor) and not p.sampler.changes_logits}
    tokens = _drawn(places, on_device)
    failed: dict[int, EchelonError] = {}
    # the host takes what a device has no token for, and what requests change
    processed = {i: _processed(place, i, failed) for i, place in enumerate(places) if tokens.get(i, -1) < 0}
    if failed and problems is None:
        raise next(iter(failed.values()))
    if problems is not None:
        problems.update(failed)
    tokens |= _drawn(places, {i: logits for i, logits in processed.items() if i not in failed})
    return [tokens.get(i, -1) for i in range(len(places))]


def _drawn(places: Sequence[Place], rows: dict[int, Tensor]) -> dict[int, int]:
    """Index of a place → its token, from logits float32 [V] after everything that changes them; −1 where the largest is not finite."""
    if not rows:
        return {}
    chosen = [places[i] for i in rows]
    logits = list(rows.values())
    tokens = devices.backend_of(logits[0]).sample_rows(logits, [p.sampler for p in chosen], [p.position for p in chosen])
    return dict(zip(rows, tokens, strict=True))


def _processed(place: Place, i: int, failed: dict[int, EchelonError]) -> Tensor:
    """Logits float32 [V] on the host as the request's parameters make them; what prevents a choice is entered in `failed`."""
    raw = devices.on_host(place.logits) if isinstance(place.logits, Tensor) else place.logits
    try:
        return torch.from_numpy(place.sampler.checked(raw, place.tokens, place.path))
    except Exception as error:
        failed[i] = row_error(error)
        return torch.empty(0)
