"""Before a head drafts: does it know this target? Asked on a short text that the target writes itself.

A head for another target, with the wrong hidden states or the wrong draft vocabulary costs speed only, and would go unnoticed. The target
continues a few single tokens greedily; at every place the head says what it would draft first, with the target's hidden states given.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.batch import Span
from echelon.heads.base import Head
from echelon.kv.cache import LayerShape, cache_for_rows
from echelon.model import pack as unpadded
from echelon.model.attention import CONTEXT_KEYWORD, CachedAttention, record_layers
from echelon.model.hidden_states import HiddenStateReader
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import ModelRunner

logger = logging.getLogger("echelon")
NUM_TEXTS, LENGTH = 16, 14  # the first token is given, the others are the target's own: 192 answers, 13 passes over 16 tokens
# A useful head is right at a third of the places or more, and the published ones at half; a share of 192 places varies by 0.03.
LEAST_GAIN, SURELY_USEFUL = 0.03, 0.5


@dataclass(frozen=True)
class Familiarity:
    """share      of places where the head's first choice is the target's token
    by_chance  what that share would be if the same choices stood at other places: a text that repeats itself is easy
    """

    share: float
    by_chance: float

    @property
    def is_chance(self) -> bool:
        """Whether the head does no better than guessing."""
        return self.share < SURELY_USEFUL and self.share - self.by_chance < LEAST_GAIN


def warn_of_chance(target: LoadedModel, head: Head, reader: HiddenStateReader, shapes: list[LayerShape]) -> None:
    """Log a warning where the head drafts no better than chance, or cannot be asked. `shapes`: what its attention layers store."""
    try:
        found = familiarity(target, head, reader, shapes)
    except Exception as error:  # whatever a head does wrong costs speed only
        logger.warning("the self-test of the %s head failed: %s: %s", head.method, type(error).__name__, error)
        return
    if found is not None and found.is_chance:
        logger.warning(
            "the %s head drafts no better than chance for %r: of the target's own text its first choice is right at %.1f%% of the places, "
            "by chance at %.1f%%. The output stays right, and drafting costs time for nothing. Likely causes: the head was trained on "
            "another target, it reads other layers than it was trained on (%s), or its draft vocabulary (d2t) is another's",
            head.method,
            target.name,
            100 * found.share,
            100 * found.by_chance,
            ", ".join(reader.names),
        )


@torch.inference_mode()
def familiarity(target: LoadedModel, head: Head, reader: HiddenStateReader, shapes: list[LayerShape]) -> Familiarity | None:
    """How well the head knows what the target says; None where the target's context is too short to ask."""
    length = min(LENGTH, target.max_len)
    if length < 3:
        return None
    text, features = _own_text(target, reader, length)
    context: dict[str, Any] = {}
    if shapes:
        spans = [Span(row, 0, tokens[1:], 0, length - 1) for row, tokens in enumerate(text.tolist())]
        cache = cache_for_rows(shapes, NUM_TEXTS, LENGTH, head.dtype, target.device)
        context[CONTEXT_KEYWORD] = CachedAttention(unpadded.pack(spans, cache.tables), cache)
    tokens, positions = (x.to(target.device) for x in (text[:, 1:].flatten(), torch.arange(length - 1).repeat(NUM_TEXTS)))
    states = head.encode(features.to(head.dtype), tokens, positions, **context)
    guesses = head.logits(states, 0).argmax(-1).cpu().view(NUM_TEXTS, -1)[:, :-1].flatten()
    answers, size = text[:, 2:].flatten(), target.vocab_size
    together = guesses.bincount(minlength=size).double() @ answers.bincount(minlength=size).double()
    return Familiarity(float((guesses == answers).double().mean()), float(together) / len(answers) ** 2)


def _own_text(target: LoadedModel, reader: HiddenStateReader, length: int) -> tuple[Tensor, Tensor]:
    """What the target says greedily after one token, int64[NUM_TEXTS, length], never an end of text; and its hidden states at all places
    but the last, [NUM_TEXTS · (length − 1), F].
    """
    cache = cache_for_rows(record_layers(target.model), NUM_TEXTS, LENGTH, target.model.dtype, target.device)
    runner = ModelRunner(target, cache)
    runner.hidden_state_reader = reader
    ends = sorted(target.eos_token_ids)
    text = [(2 * torch.arange(NUM_TEXTS) + 1) * target.vocab_size // (2 * NUM_TEXTS)]
    features = []
    for start in range(length - 1):
        spans = [Span(row, start, [token], 1, length) for row, token in enumerate(text[-1].tolist())]
        logits, seen = runner.run(runner.pack(spans))
        assert seen is not None
        features.append(seen)
        logits[:, ends] = -torch.inf
        text.append(logits.argmax(-1).cpu())
        for span in spans:
            runner.cache.tables.advance(span.row, start + 1)
    return torch.stack(text, 1), torch.stack(features, 1).flatten(0, 1)
