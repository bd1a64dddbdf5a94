"""The self-test of a model before it is served: whether a small random twin batches exactly.

Every attention layer must call our function, and each row's logits in a ragged batch must equal the eager forward pass of that row
alone, in float32; what our operations then do in its modules is the matter of `servedtest`. The twin has two layers of every kind in the
original, and whatever the original counts in tokens is short (`shrink`), so that it shows within 24 tokens. What cannot be batched is
refused for one of the reasons of `Refusal`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from echelon.errors import Refusal, UnsupportedModelError
from echelon.inputs import first_line
from echelon.model.load.servedtest import ServedTwin, check_rounding, check_served, difference, eager
from echelon.model.load.shrink import VOCABULARY, part_for, shrunken
from echelon.ops import compiled

LENGTHS = (24, 3)  # one long row, one short
TOLERANCE = 1e-4  # relative to the largest logit
MAX_PARAMETERS = 400_000_000  # of a twin


_passed: set[tuple[object, ...]] = set()


def self_test(cls: type[PreTrainedModel], config: Any, dtype: torch.dtype = torch.float32) -> None:
    """Raise `UnsupportedModelError`, with the reason, unless models of this class and configuration batch exactly, as they are and with
    our operations in them (`check_served`), also in `dtype`. What has passed is not tried again.
    """
    key = cls, config.to_json_string(use_diff=False), dtype, compiled.is_built() and compiled.isa()
    if key in _passed:
        return
    rows = [torch.arange(n, dtype=torch.int64) * 7 % (VOCABULARY - 3) + 3 for n in LENGTHS]
    with torch.inference_mode():
        small = _small(cls, part_for(cls, config), rows[0])
        twin = _twin(cls, small)
        _check_kind(twin, rows[0])
        _check_batches(twin, rows)
    row = rows[0].tolist()
    check_served(lambda: _twin(cls, small), row)
    if dtype != torch.float32:
        check_rounding(lambda: _twin(cls, small), row, dtype)
    _passed.add(key)


def _small(cls: type[PreTrainedModel], config: Any, tokens: Tensor) -> Any:
    """A configuration whose models run; where widths do not shrink together they stay."""
    errors: list[Exception] = []
    for is_narrow in (True, False):
        try:
            small = shrunken(config, is_narrow)
            _check_size(cls, small)
            eager(_twin(cls, small), tokens)
            return small
        except ImportError as error:
            raise UnsupportedModelError.because(cls.__name__, Refusal.PACKAGE, first_line(error)) from error
        except Exception as error:  # whatever the framework raises
            errors.append(error)
    raise UnsupportedModelError.because(cls.__name__, Refusal.INPUTS, first_line(errors[-1])) from errors[-1]


def _check_size(cls: type[PreTrainedModel], config: Any) -> None:
    with torch.device("meta"):
        model = cls._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise MemoryError(f"a model of this kind has {count:,} parameters at least, too many to try")


def _check_batches(twin: PreTrainedModel, rows: list[Tensor]) -> None:
    """A ragged batch through our attention alone, nothing else replaced, gives each row its own logits."""
    alone = [eager(twin, row) for row in rows]
    stretched = eager(twin, rows[0], 2 * torch.arange(len(rows[0])))
    reasons = [Refusal.MASK, Refusal.BATCH] if difference(alone[0], stretched) else [Refusal.POSITIONS] * 2
    for reason, some, split in zip(reasons, (rows[:1], rows), (0, len(rows[0]) // 2), strict=True):
        for row, expected, got in zip(LENGTHS, alone, _ragged(twin, some, split), strict=False):
            if not (found := difference(expected, got)) < TOLERANCE:
                detail = f"its logits in a ragged batch differ by {found:.1e} from those alone, in a row of {row} tokens"
                raise UnsupportedModelError.because(type(twin).__name__, reason, detail)


def _twin(cls: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A random float32 model whose weights are wide enough that wrong attention changes the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = cls._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
        for parameter in twin.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.2)
    return twin.eval()


def _check_kind(twin: PreTrainedModel, tokens: Tensor) -> None:
    """Refuse what shows without batching: models that keep state or are not causal."""
    name = type(twin).__name__
    if _keeps_state(twin, tokens):
        raise UnsupportedModelError.because(name, Refusal.STATE)
    changed = torch.cat([tokens[:-1], tokens[:1]])
    before, after = (eager(twin, row)[:-1] for row in (tokens, changed))
    if not difference(before, after) < TOLERANCE:
        raise UnsupportedModelError.because(name, Refusal.NOT_CAUSAL)


def _keeps_state(twin: PreTrainedModel, tokens: Tensor) -> bool:
    """Whether its cache holds anything but keys and values by position."""
    types = getattr(twin.config.get_text_config(decoder=True), "layer_types", None) or []
    if getattr(type(twin), "_is_stateful", False) or "linear_attention" in types:
        return True
    try:
        cache = twin(input_ids=tokens[None], use_cache=True).get("past_key_values")
    except Exception:  # what cannot be cached so is judged by what follows
        return False
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers = cache.layers if isinstance(cache, DynamicCache) else []
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return any(isinstance(x, LinearAttentionCacheLayerMixin) or (isinstance(x, DynamicLayer) and type(x) not in plain) for x in layers)


def _ragged(twin: PreTrainedModel, rows: list[Tensor], split: int) -> list[Tensor]:
    """The rows in one batch through our attention; the first row in two steps where `split`, so that cached keys are read too."""
    try:
        served, lengths = ServedTwin(twin, is_bare=True), dict(enumerate(map(len, rows)))
        before = served.feed({0: rows[0][:split].tolist()}, lengths, lengths) if split else {}
        after = served.feed({i: row[0 if i else split :].tolist() for i, row in enumerate(rows)}, lengths, lengths)
    except UnsupportedModelError as error:
        name = type(twin).__name__
        raise UnsupportedModelError(f"{error}" if name in str(error) else f"{name}: {error}", error.refusal) from error
    except Exception as error:  # a model that fails inside is refused by name, whatever it raises
        raise UnsupportedModelError(f"{type(twin).__name__} cannot run as a ragged batch: {first_line(error)}") from error
    return [torch.cat([before[i], logits]) if i in before else logits for i, logits in after.items()]
