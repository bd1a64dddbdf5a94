"""One token for each of many places, by the rule of `sampling.Sampler`: compiled where the extension was built, else the rule itself; on
CUDA devices by Triton.

The kernel finds the thresholds of top-k and top-p without a sort, and computes noise only for tokens that can still win. A place's token
depends on that place alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.errors import EchelonError, row_error
from echelon.ops import devices
from echelon.ops.compiled import is_built, kernels
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
        return len(self.tokens) + len(self.path)


def raw_rows(logits: Tensor) -> NDArray[np.float32] | Tensor:
    """float32 [R, V] as places have them: for NumPy, or a tensor where Triton draws."""
    return logits.float() if devices.by_triton(logits) else devices.on_host(logits)


def choose(places: Sequence[Place], problems: dict[int, EchelonError] | None = None) -> list[int]:
    """The sampler's own token at every place; −1 at a place that has none, where `problems` is given to take the reason.

    Raises
    ------
    EchelonError  a place has no token, and `problems` is not given: its logits hold NaN or infinity, its parameters forbid every token
                  (a `RequestError`), or a logits processor raised
    """
    if places and isinstance(places[0].logits, Tensor):
        return _choose_on_device(places, problems)
    found: dict[int, EchelonError] = {}
    processed = [_processed(place, i, found) for i, place in enumerate(places)]
    if found and problems is None:
        raise next(iter(found.values()))
    if problems is not None:
        problems.update(found)
    greedy = [p.sampler.params.is_greedy for p in places]
    tokens = [-1] * len(places)
    for i in (i for i, is_greedy in enumerate(greedy) if is_greedy and i not in found):
        tokens[i] = int(processed[i].argmax())
    drawn = [i for i, is_greedy in enumerate(greedy) if not is_greedy and i not in found]
    for i, token in zip(drawn, _draw([places[i] for i in drawn], [processed[i] for i in drawn]), strict=True):
        tokens[i] = token
    return tokens


def _choose_on_device(places: Sequence[Place], problems: dict[int, EchelonError] | None) -> list[int]:
    """Places that Triton has no token for, and those whose request changes logits, come to the host: it chooses, or says why it cannot."""
    from echelon.ops.triton.sample import sample_rows  # imports Triton

    tokens = [-1] * len(places)
    plain = [i for i, place in enumerate(places) if not place.sampler.changes_logits]
    if plain:
        logits = torch.stack([torch.as_tensor(places[i].logits) for i in plain])
        for i, token in zip(plain, sample_rows(logits, *_columns([places[i] for i in plain])).tolist(), strict=True):
            tokens[i] = token
    left = [i for i, token in enumerate(tokens) if token < 0]
    failed: dict[int, EchelonError] = {}
    hosted = [replace(places[i], logits=devices.on_host(torch.as_tensor(places[i].logits))) for i in left]
    for i, token in zip(left, choose(hosted, None if problems is None else failed), strict=True):
        tokens[i] = token
    if problems is not None:
        problems.update({left[n]: error for n, error in failed.items()})
    return tokens


def _processed(place: Place, i: int, problems: dict[int, EchelonError]) -> NDArray[np.float32]:
    """Logits [V] as the request's parameters make them; what prevents a choice is entered in `problems`."""
    assert isinstance(place.logits, np.ndarray)
    try:
        return place.sampler.checked(place.logits, place.tokens, place.path)
    except Exception as error:
        problems[i] = row_error(error)
        return place.logits


def _draw(places: list[Place], logits: list[NDArray[np.float32]]) -> list[int]:
    if not is_built():
        return [p.sampler.choose_processed(values, p.position) for p, values in zip(places, logits, strict=True)]
    drawn: list[int] = kernels.sample_rows([torch.from_numpy(values) for values in logits], *_columns(places))
    return drawn


def _columns(places: Sequence[Place]) -> tuple[list[Any], ...]:
    """temperature, top_k, top_p, min_p, seed, index and position of every place."""
    params = [p.sampler.params for p in places]
    return (
        [q.temperature for q in params],
        [q.top_k for q in params],
        [q.top_p for q in params],
        [q.min_p for q in params],
        [p.sampler.seed for p in places],
        [p.sampler.index for p in places],
        [p.position for p in places],
    )
