"""The forward pass of a model over packed tokens; sampling parameters of a chain of passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from echelon.model.attention import CONTEXT_KEYWORD, AttentionContext
from echelon.model.hidden_states import HiddenStateReader
from echelon.model.load.loading import LoadedModel


@dataclass(frozen=True)
class Draws:
    """Sampling in a chain of passes: parameters of each row, and the noise keys of each pass and row (`sampling.noise_key`)."""

    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    noise_keys: Sequence[Sequence[int]]


def forward(
    loaded: LoadedModel, reader: HiddenStateReader | None, tokens: Tensor, positions: Tensor, logit_rows: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor | None]:
    """Run the model on what lies on its device: logits [R, V] and hidden states [T, F] for tokens and positions int [T], logit_rows [R]."""
    with reader.reading() if reader else nullcontext() as states:
        output = loaded.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=logit_rows, **{CONTEXT_KEYWORD: context}
        )
    logits: Tensor = output.logits[0]
    return logits, reader.joined(states, len(tokens)) if reader and states is not None else None
