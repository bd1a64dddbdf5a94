"""Does every way of batching and drafting give the text of plain decoding alone? Where not: is it a tie of rounding, or a fault?

The reference is plain greedy decoding at batch 1, unpadded, in the same dtype. A row that differs is judged at its first different token:
it is a tie only if both tokens are the float32 model's top two after the same prefix, and their float32 logits lie no further apart than
twice the error that the dtype makes there at batch 1 (two logits, each off by at most the error, can change places within that). In
float32 itself that error is zero, so there a difference is always a fault.

A model in integers is compared with itself: the reference and the float32 model have the same integers. Its layers round what they are
given, so that the last bit of a sum may decide between two integers, in float32 too. The framework's attention adds in another order than
ours; strategies that use it are judged in float32 by the error that this order makes at batch 1, and `unpadded` by none. Such errors are
large enough for a third token to come between the two: in integers both must lie within twice the error of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from echelon.batch import Span
from echelon.config import check_settings
from echelon.errors import ConfigError
from echelon.llm import LLM
from echelon.model.load.loading import LoadedModel, load_model, load_plain
from echelon.model.load.reading import DTYPES
from echelon.ops.devices import chosen_device
from echelon.sampling import SamplingParams

STRATEGY_SETTINGS: dict[str, dict[str, Any]] = {
    "unpadded": {},
    "padded": {"strategy": "padded"},
    "padded-kv": {"strategy": "padded", "pad": "kv"},
    "padded-inputs": {"strategy": "padded", "pad": "inputs"},
    "realign": {"strategy": "realign"},
    "same-length": {"strategy": "realign", "grouping": "same_length"},
}
PAD = 0  # of the framework's batches: masked, and never looked for
FRAMEWORK = "transformers"  # a control: `generate` at a batch against itself at batch 1
Tokens = list[int]


@dataclass(frozen=True)
class Case:
    """One cell of the table. `drafter` "plain" is plain decoding: a control of batching alone; batch 1 is a control of drafting alone."""

    dtype: str
    strategy: str
    drafter: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.dtype}, {self.strategy}, {self.drafter}, batch {self.batch_size}"


@dataclass(frozen=True)
class Mismatch:
    """The first different token of a row; `gap` between the two tokens and `error` of the dtype are in logits."""

    row: int
    position: int
    token: int | None
    expected: int | None
    gap: float
    error: float
    is_tie: bool


@dataclass(frozen=True)
class EqualityResult:
    """How many of the rows are equal, cut at EOS; `partial_match`: mean share of the reference's tokens before the first difference."""

    case: Case
    num_rows: int
    num_exact: int
    partial_match: float
    is_judged: bool = True
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def exact_match(self) -> float:
        return self.num_exact / self.num_rows

    @property
    def num_faults(self) -> int:
        return sum(not m.is_tie for m in self.mismatches) if self.is_judged else 0


@dataclass(frozen=True)
class VerificationJob:
    """What is verified: a model by name, token ids of prompts, and the settings of the runs and of their reference (`EngineConfig`)."""

    model: str
    prompts: SequenceOf[SequenceOf[int]]
    drafters: Mapping[str, Mapping[str, Any] | None]  # name → speculative_config
    max_tokens: int
    refill: bool = True
    device: str = "auto"
    numerics: str = "invariant"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def numbers(self) -> dict[str, Any]:
        """Settings that every engine over the loaded model has, the reference's too."""
        return {"numerics": self.numerics, "kv_cache_dtype": self.kv_cache_dtype}


def check_strategies(names: SequenceOf[str], **settings: Any) -> None:
    """Raise `ConfigError` for a strategy that is none, or that does not go with the settings of an engine."""
    for name in names:
        if name not in STRATEGY_SETTINGS:
            raise ConfigError(f"there is no strategy {name!r} here; known: {', '.join(STRATEGY_SETTINGS)}")
        check_settings(**STRATEGY_SETTINGS[name], **settings)


def cut(tokens: SequenceOf[int], end_tokens: frozenset[int]) -> Tokens:
    """Up to and including the first end-of-text token."""
    ends = (place + 1 for place, token in enumerate(tokens) if token in end_tokens)
    return list(tokens[: next(ends, len(tokens))])


def first_difference(tokens: SequenceOf[int], expected: SequenceOf[int]) -> int | None:
    """Where two texts part; the length of the shorter where one is the beginning of the other; `None` if they are equal."""
    return next((place for place, (one, other) in enumerate(zip_longest(tokens, expected)) if one != other), None)


def generate_padded(model: PreTrainedModel, rows: SequenceOf[SequenceOf[int]], max_new_tokens: int, **extra: Any) -> list[Tokens]:
    """New tokens of every row by greedy `generate` of `transformers`, on one rectangle that is padded on the left; `extra` is for it."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    done = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=PAD, **extra)
    return list(done[:, width:].tolist())


def logits_after(llm: LLM, tokens: SequenceOf[int]) -> Tensor:
    """float32 [V] after a text, from one pass over it alone."""
    with llm.exclusive() as engine:
        runner, row = engine.target, -1
        runner.cache.tables.reserve(row, len(tokens))
        logits = runner.feed([Span(row, 0, tokens, 1, len(tokens))])[0].float()
        runner.cache.tables.release(row)
    return logits


class Judge:
    """Says whether two tokens after the same prefix are a tie of rounding; `in_integers` a third may lie between them."""

    def __init__(self, exact: LLM, rounded: LLM, in_integers: bool = False) -> None:
        self._exact, self._rounded, self._in_integers = exact, rounded, in_integers

    def compare(self, row: int, prompt: SequenceOf[int], tokens: Tokens, expected: Tokens, place: int) -> Mismatch:
        token = tokens[place] if place < len(tokens) else None
        wanted = expected[place] if place < len(expected) else None
        if token is None or wanted is None:  # one text ended where the other went on: no two tokens to tie
            return Mismatch(row, place, token, wanted, torch.inf, 0.0, is_tie=False)
        prefix = [*prompt, *expected[:place]]
        exact, rounded = logits_after(self._exact, prefix), logits_after(self._rounded, prefix)
        error = float((exact - rounded).abs().max())
        gap = float((exact[token] - exact[wanted]).abs())
        are_top_two = {token, wanted} == set(exact.topk(2).indices.tolist())
        behind = float(exact.max() - torch.minimum(exact[token], exact[wanted]))
        is_tie = behind <= 2 * error if self._in_integers else are_top_two and gap <= 2 * error
        return Mismatch(row, place, token, wanted, gap, error, is_tie)


def compare(
    case: Case, outputs: SequenceOf[Tokens], truth: SequenceOf[Tokens], request: VerificationJob, judge: Judge | None
) -> EqualityResult:
    """Row by row; without a judge the differences are counted and not explained."""
    places = [first_difference(a, b) for a, b in zip(outputs, truth, strict=True)]
    shares = [1.0 if place is None else place / max(1, len(expected)) for place, expected in zip(places, truth, strict=True)]
    mismatches = [
        judge.compare(row, request.prompts[row], outputs[row], truth[row], place)
        for row, place in enumerate(places)
        if judge is not None and place is not None
    ]
    return EqualityResult(case, len(truth), places.count(None), sum(shares) / len(shares), judge is not None, mismatches)


def verify_dtype(
    request: VerificationJob,
    dtype: str,
    strategies: SequenceOf[str],
    batch_sizes: SequenceOf[int],
    has_control: bool,
) -> Iterator[EqualityResult]:
    """Every strategy × drafter × batch size in one dtype, and with `has_control` `transformers`, which runs no integers, against itself."""
    target = load_model(request.model, dtype=dtype, device=request.device, numerics=request.numerics, quantization=request.quantization)
    alone = LLM(target, max_num_seqs=1, **request.numbers)
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens)
    truth = [alone.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids for p in request.prompts]
    judges = _judges(request, dtype, strategies, alone)
    for strategy, (drafter, config), size in product(strategies, request.drafters.items(), batch_sizes):
        outputs = _generate(target, config, STRATEGY_SETTINGS[strategy], size, request, params)
        yield compare(Case(dtype, strategy, drafter, size), outputs, truth, request, judges[strategy])
    if has_control:
        yield from _control(request, dtype, batch_sizes, target.eos_token_ids)


def _judges(request: VerificationJob, dtype: str, strategies: SequenceOf[str], alone: LLM) -> dict[str, Judge]:
    """Strategy → who judges its differences."""
    in_integers = alone.target.quantization is not None
    if dtype != "float32":
        numbers: dict[str, Any] = {"quantization": request.quantization, "kv_cache_dtype": request.kv_cache_dtype}
        exact = LLM(request.model, dtype="float32", device=request.device, max_num_seqs=1, **numbers)
        return dict.fromkeys(strategies, Judge(exact, alone, in_integers))
    judges = dict.fromkeys(strategies, Judge(alone, alone))
    others = [s for s in strategies if s != "unpadded"]
    if in_integers and others:
        judges |= dict.fromkeys(others, Judge(alone, LLM(alone.target, max_num_seqs=1, strategy="padded"), in_integers))
    return judges


def _generate(
    target: LoadedModel,
    config: Mapping[str, Any] | None,
    strategy: Mapping[str, Any],
    batch_size: int,
    request: VerificationJob,
    params: SamplingParams,
) -> list[Tokens]:
    llm = LLM(target, config, max_num_seqs=batch_size, refill=request.refill, **request.numbers, **strategy)
    return [o.outputs[0].token_ids for o in llm.generate(list(request.prompts), params, use_tqdm=False)]


def _control(request: VerificationJob, dtype: str, batch_sizes: SequenceOf[int], end_tokens: frozenset[int]) -> Iterator[EqualityResult]:
    """What batching costs in equality elsewhere: reported, not judged."""
    model = load_plain(request.model)[0].to(chosen_device(request.device), DTYPES[dtype])
    truth = _framework_generate(model, request, 1, end_tokens)
    for size in (s for s in batch_sizes if s > 1):
        outputs = _framework_generate(model, request, size, end_tokens)
        yield compare(Case(dtype, FRAMEWORK, "plain", size), outputs, truth, request, None)


def _framework_generate(model: PreTrainedModel, request: VerificationJob, batch_size: int, end_tokens: frozenset[int]) -> list[Tokens]:
    """Static batches through `generate`."""
    batches = [request.prompts[start : start + batch_size] for start in range(0, len(request.prompts), batch_size)]
    return [cut(row, end_tokens) for rows in batches for row in generate_padded(model, rows, request.max_tokens)]


def verify_model(
    request: VerificationJob,
    dtypes: SequenceOf[str],
    strategies: SequenceOf[str],
    batch_sizes: SequenceOf[int],
    has_control: bool = True,
    on_result: Callable[[EqualityResult], None] = lambda _: None,
) -> list[EqualityResult]:
    """All cells of the table, in order of dtype, strategy, drafter, batch size."""
    check_strategies(strategies, kv_cache_dtype=request.kv_cache_dtype)
    if unknown := [d for d in dtypes if d not in DTYPES]:
        raise ConfigError(f"there is no dtype {unknown[0]!r}; known: {', '.join(DTYPES)}")
    results = []
    for dtype in dtypes:
        for result in verify_dtype(request, dtype, strategies, batch_sizes, has_control):
            results.append(result)
            on_result(result)
    return results
