"""Which logits processors and stopping criteria may be asked out of turn, and how they see one row of a batch.

Speculation asks about drafted tokens that may be taken back, and rows run ahead of each other. A processor whose answer for a row depends
on that row's ids and scores alone cannot tell; one that keeps state from call to call can. Classes of `transformers` known to be of the
first kind are listed here; others say so by an attribute `is_pure = True`, and else are called as `generate` calls them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process, stopping_criteria

PURE_PROCESSORS = frozenset(
    [
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",
    ]
)
PURE_CRITERIA = frozenset(["EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria"])


def stateful(parts: Iterable[Any]) -> list[str]:
    """Names of the processors and criteria that may keep state."""
    return [type(part).__name__ for part in parts if not _is_pure(part)]


def _is_pure(part: Any) -> bool:
    cls = type(part)
    if cls is logits_process.PrefixConstrainedLogitsProcessor:
        return bool(getattr(part._prefix_allowed_tokens_fn, "is_pure", False))
    is_known = cls in (getattr(logits_process, cls.__name__, None), getattr(stopping_criteria, cls.__name__, None))
    return bool(getattr(part, "is_pure", False)) or (is_known and cls.__name__ in PURE_PROCESSORS | PURE_CRITERIA)


def for_row(processors: LogitsProcessorList, row: int, num_rows: int) -> LogitsProcessorList:
    """Processors as one row of a batch of `num_rows` meets them, to be called with ids [1, n] and scores [1, V]."""
    return LogitsProcessorList([_for_row(processor, row, num_rows) for processor in processors])


def _for_row(processor: Any, row: int, num_rows: int) -> Any:
    """A shallow copy with what belongs to the row, of those that hold something by place in the batch."""
    cls = type(processor)
    if cls is logits_process.RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        return _with(processor, prompt_ignore_length=processor.prompt_ignore_length[row : row + 1])
    if cls is logits_process.EncoderRepetitionPenaltyLogitsProcessor:
        copies = max(1, num_rows // len(processor.encoder_input_ids))
        return _with(processor, encoder_input_ids=processor.encoder_input_ids[row // copies][None])
    if cls is logits_process.EncoderNoRepeatNGramLogitsProcessor:
        copies = max(1, num_rows // processor.batch_size)
        return _with(processor, generated_ngrams=[processor.generated_ngrams[row // copies]], batch_size=1)
    if cls is logits_process.PrefixConstrainedLogitsProcessor:
        allowed: Callable[[int, Tensor], list[int]] = processor._prefix_allowed_tokens_fn
        return _with(processor, _prefix_allowed_tokens_fn=lambda _, ids: allowed(row // processor._num_beams, ids))
    return processor


def _with(processor: Any, **changes: Any) -> Any:
    changed = copy.copy(processor)
    vars(changed).update(changes)
    return changed


def processed(processors: LogitsProcessorList, ids: Tensor, logits: Tensor) -> Tensor:
    """Scores [1, V] or [B, V] of raw logits, which stay as they are."""
    with torch.no_grad():
        scores: Tensor = processors(ids, logits.clone())
    return scores
