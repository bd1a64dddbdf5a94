"""The likeliest next tokens of many texts as their requests would choose them: what a drafter grows trees from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.ops import devices
from echelon.ops.contract import Float64, Int64
from echelon.sampling import Sampler

NUM_CANDIDATES = 128  # likeliest tokens of a sampled row that noise is drawn for


def likeliest(
    logits: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    width: int,
    only_ranks: bool = False,
    sharpness: float = 1.0,
) -> tuple[Int64, Float64]:
    """Likeliest tokens, of equals the lower id first, and their log-probabilities: int64 and float64 [M, min(width, V)].

    logits [M, V] have been through everything that changes them; the tokens will have `positions`. A greedy row ranks by probability; its
    scores are those of logits times `sharpness`, and with `only_ranks` relative to the likeliest token's, which saves a pass over V. A
    sampled one ranks by filtered and perturbed logits, with the noise that the target will draw with there: as this noise decides what the
    target chooses, their softmax says how sure that is. The filters see the NUM_CANDIDATES likeliest tokens. A row whose largest logit is
    not finite, or with a NaN, has the score −∞ everywhere.
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
