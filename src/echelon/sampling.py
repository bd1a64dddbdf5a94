"""Sampling parameters, and the one rule that turns a row of logits into a token.

Sampling is greedy over perturbed logits: the token is the argmax of processed float32 logits plus Gumbel noise, and the noise is a
pure function of (seed, index among n, position, token id). Whoever computes the same logits for the same place in the same request
therefore draws the same token, whatever else is in the batch, and with or without speculation. A draft model that draws with the
same noise agrees with its target about as often as the two distributions allow (Daliri, Musco, Suresh 2024, "Coupling without
Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, model_validator

from echelon.errors import EchelonError, RequestError, RowError
from echelon.inputs import LARGEST, IdKey, Text, kind_of
from echelon.settings import Settings
from echelon.token_counts import TokenCounts

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
LISTS = ("stop", "stop_token_ids", "bad_words", "logits_processors")  # parameters of which None is an empty list
LogitsProcessor = Callable[[list[int], Any], Any]  # (output tokens so far, float32 [V]) → float32 [V], like vLLM's

ACCEPT, RESIDUAL = 1, 2  # purposes of noise besides choosing a token
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class SamplingParams(Settings):
    """Names, meanings and defaults of vLLM's `SamplingParams`; `temperature=0` is greedy.

    A field may be assigned to, and is checked with all others as at construction. A request keeps the values that it was given with.
    """

    model_config = ConfigDict(frozen=False)
    error: ClassVar[type[EchelonError]] = RequestError

    temperature: StrictFloat = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="0 is greedy.")
    top_k: StrictInt = Field(default=0, ge=-1, lt=LARGEST, description="Keep the k likeliest tokens; 0 keeps all.")
    top_p: StrictFloat = Field(default=1.0, gt=0.0, le=1.0, description="Keep the likeliest tokens of this mass.")
    min_p: StrictFloat = Field(default=0.0, ge=0.0, le=1.0, description="Keep tokens at least this likely, relative to the likeliest.")
    seed: StrictInt | None = Field(default=None, ge=0, lt=1 << 64, description="Seed of sampling; without it one is drawn and reported.")
    max_tokens: StrictInt | None = Field(
        default=16, ge=1, lt=LARGEST, description="Most new tokens a prompt; in Python None: as many as the context holds."
    )
    min_tokens: StrictInt = Field(default=0, ge=0, lt=LARGEST, description="New tokens before a text may end by EOS or a stop token.")
    n: StrictInt = Field(default=1, ge=1, le=1024, description="Continuations of each prompt.")
    stop: tuple[Text, ...] = Field(default=(), description="End a text before this string; may be repeated.")
    include_stop_str_in_output: StrictBool = Field(default=False, description="Keep what stopped a text at its end.")
    stop_token_ids: tuple[StrictInt, ...] = Field(default=(), description="End a text at any of these tokens.")
    ignore_eos: StrictBool = Field(default=False, description="Go on after the end-of-text token.")
    skip_special_tokens: StrictBool = Field(default=True, description="Leave special tokens out of the text.")
    presence_penalty: StrictFloat = Field(default=0.0, ge=-2.0, le=2.0, description="Taken from logits of tokens that the output has.")
    frequency_penalty: StrictFloat = Field(default=0.0, ge=-2.0, le=2.0, description="The same, times how often it has them.")
    repetition_penalty: StrictFloat = Field(
        default=1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Divides positive logits of tokens that prompt or output has; multiplies others.",
    )
    logit_bias: dict[IdKey, StrictFloat] | None = Field(default=None, description="Added to the logits of tokens, by id.")
    allowed_token_ids: tuple[StrictInt, ...] | None = Field(default=None, description="No other token may be chosen.")
    bad_words: tuple[Text, ...] = Field(default=(), description="Words whose tokens may not be completed.")
    logits_processors: tuple[LogitsProcessor, ...] = Field(
        default=(), description="Functions of the output's token ids and the logits, float32 [V], that give new logits."
    )
    logprobs: StrictInt | None = Field(
        default=None, ge=0, lt=LARGEST, description="Likeliest tokens of each place to report, with its own."
    )
    prompt_logprobs: StrictInt | None = Field(default=None, ge=0, lt=LARGEST, description="The same of the prompt.")
    num_speculative_tokens: StrictInt | None = Field(
        default=None, ge=0, lt=LARGEST, description="Most drafted tokens in a step of this request; 0 turns drafting off."
    )

    @model_validator(mode="before")
    @classmethod
    def _as_lists(cls, values: dict[str, object]) -> dict[str, object]:
        """One stop string stands for a list of one, None for an empty list, and −1 for no seed, as in vLLM."""
        if isinstance(values.get("stop"), str):
            values = values | {"stop": (values["stop"],)}
        if type(values.get("seed")) is int and values["seed"] == -1:
            values = values | {"seed": None}
        return values | {name: () for name in LISTS if values.get(name, ()) is None}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(not s for s in (*self.stop, *self.bad_words)):
            raise ValueError("stop or bad_words holds an empty string, which would match everywhere; remove it")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}; lower it")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty, so no token could be chosen; name at least one or leave it out")
        return self

    def __setattr__(self, name: str, value: object) -> None:
        changed = type(self)(**{field: getattr(self, field) for field in type(self).model_fields} | {name: value})
        self.__dict__[name] = getattr(changed, name)
        self.model_fields_set.add(name)

    __hash__ = None  # type: ignore[assignment]  # it may change

    def copied(self) -> Self:
        """The same values in an object of their own, which assignments to this one do not reach."""
        return self.model_copy(update=None if self.logit_bias is None else {"logit_bias": dict(self.logit_bias)})

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or more than any context holds."""
        return LARGEST if self.max_tokens is None else self.max_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0

    @property
    def token_ids(self) -> dict[str, Iterable[int]]:
        """By field, the token ids that the parameters name; all must lie in the vocabulary."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
        }


Parameters = SamplingParams | Mapping[str, Any]


def one_each(params: Parameters | Sequence[Parameters], num_prompts: int) -> list[SamplingParams]:
    """Parameters of every prompt as they are now, from one for all or a list with one each; mappings have the same keys."""
    if not isinstance(params, list | tuple):
        return [_parameters(params, "sampling_params")] * num_prompts
    found = [_parameters(given, f"sampling_params[{i}]") for i, given in enumerate(params)]
    if len(found) != num_prompts:
        raise RequestError(f"{len(found)} sampling parameters for {num_prompts} prompts; give one for all or one each")
    return found


def _parameters(given: Any, name: str) -> SamplingParams:
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return SamplingParams(**given)
    if not isinstance(given, SamplingParams):
        raise RequestError(f"{name} is {kind_of(given)}; give SamplingParams(...) or a mapping, for all prompts or in a list with one each")
    return given.copied()


@dataclass(frozen=True)
class Sampler:
    """The rule of one request, with everything resolved to token ids: a function of logits and the text before, and of nothing else.

    ends       ids that may not be chosen before `min_tokens` (EOS and stop tokens)
    bad_words  token sequences whose last token may not complete them
    """

    params: SamplingParams
    seed: int
    index: int = 0  # among the n samples of a prompt
    num_prompt_tokens: int = 0
    ends: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    _text_counts: TokenCounts = field(default_factory=TokenCounts, init=False, repr=False, compare=False)  # of prompt and output

    @cached_property
    def _output_counts(self) -> TokenCounts:
        return TokenCounts(self.num_prompt_tokens)

    @property
    def is_argmax(self) -> bool:
        """Nothing but the largest raw logit matters."""
        return self.params.is_greedy and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Logits are processed before the temperature."""
        p = self.params
        by_history = self.has_penalties or self.bad_words or p.logits_processors
        return bool(p.min_tokens or by_history or p.logit_bias or p.allowed_token_ids)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens are penalised for how often they stand in the text."""
        p = self.params
        return p.presence_penalty != 0.0 or p.frequency_penalty != 0.0 or p.repetition_penalty != 1.0

    def choose(self, logits: Float32, tokens: Sequence[int], path: Sequence[int] = ()) -> int:
        """The token after `tokens` and the drafted `path`, which counts as if it were committed. `logits` float32 [V], raw."""
        return self.choose_processed(self.checked(logits, tokens, path), len(tokens) + len(path))

    def choose_processed(self, logits: Float32, position: int) -> int:
        """Argmax of processed logits, plus keyed noise on what the filters keep."""
        if self.params.is_greedy:
            return int(logits.argmax())
        scaled = logits / np.float32(self.params.temperature)
        ids = kept_tokens(scaled, self.params)
        return int(ids[np.argmax(scaled[ids] + gumbel_noise(self.seed, self.index, position, ids))])

    def probabilities(self, logits: Float32, tokens: Sequence[int], path: Sequence[int] = ()) -> NDArray[np.float64]:
        """float64 [V]: what `choose` draws from."""
        processed = self.checked(logits, tokens, path)
        out = np.zeros(len(processed))
        if self.params.is_greedy:
            out[processed.argmax()] = 1.0
            return out
        scaled = processed / np.float32(self.params.temperature)
        ids = kept_tokens(scaled, self.params)
        weights = np.exp(scaled[ids].astype(np.float64) - float(scaled.max()))
        out[ids] = weights / weights.sum()
        return out

    def accepts(self, probability: float, draft_probability: float, position: int) -> bool:
        """The coin of rejection sampling: heads with probability min(1, target / draft)."""
        coin = uniform_noise(self.seed, self.index, position, np.zeros(1, np.int64), ACCEPT)[0]
        return bool(coin * draft_probability < probability)

    def draw(self, weights: NDArray[np.float64], position: int) -> int:
        """A token in proportion to `weights` [V], with noise that no other draw at this position uses."""
        ids = np.flatnonzero(weights > 0.0)
        return int(ids[np.argmax(np.log(weights[ids]) + gumbel_noise(self.seed, self.index, position, ids, RESIDUAL))])

    def checked(self, logits: Float32, tokens: Sequence[int], path: Sequence[int] = ()) -> Float32:
        """`processed` logits from which a token can be chosen.

        Raises
        ------
        RowError      the model's logits hold NaN or infinity, or nothing but −infinity
        RequestError  the request's parameters forbid every token or overflow, or a logits processor changes the shape
        """
        out = self.processed(logits, tokens, path)
        where = f"at position {len(tokens) + len(path)}"
        if out.shape != logits.shape:
            raise RequestError(f"a logits processor turned {logits.shape} logits {where} into {out.shape}; it must keep the shape")
        highest = float(out.max())  # NaN where any is
        if not np.isfinite(highest):
            if not np.isfinite(logits.max()):
                raise RowError(f"the largest logit {where} is {highest}: the model overflowed")
            raise RequestError(f"the largest logit {where} is {highest}: the parameters forbid every token or overflow; relax them")
        if abs(highest) > self.params.temperature * 1e38 and not self.params.is_greedy:
            raise RequestError(f"temperature = {self.params.temperature} makes logits {where} overflow; use 0 for greedy decoding")
        return out

    def processed(self, logits: Float32, tokens: Sequence[int], path: Sequence[int] = ()) -> Float32:
        """Logits after everything that may change their order, in vLLM's sequence; the input is left as it is."""
        p = self.params
        if not self.changes_logits:
            return logits
        out = logits.copy()
        if p.allowed_token_ids is not None:
            out = np.full_like(logits, -np.inf)
            allowed = list(p.allowed_token_ids)
            out[allowed] = logits[allowed]
        num_output = len(tokens) + len(path) - self.num_prompt_tokens
        for word in self.bad_words:
            if len(word) - 1 <= num_output and _last(tokens, path, len(word) - 1) == word[:-1]:
                out[word[-1]] = -np.inf
        if num_output < p.min_tokens:
            out[list(self.ends)] = -np.inf
        for token, bias in (p.logit_bias or {}).items():
            out[token] += np.float32(bias)
        if self.has_penalties:
            self._penalise(out, tokens, path)
        if p.logits_processors:
            output = [*tokens, *path][self.num_prompt_tokens :]
            for processor in p.logits_processors:
                out = np.array(processor(output, out), np.float32, order="C")
        return out

    def _penalise(self, out: Float32, tokens: Sequence[int], path: Sequence[int]) -> None:
        """Repetition (prompt and output; Keskar et al. 2019), frequency and presence (output only; OpenAI's definitions)."""
        p = self.params
        if p.repetition_penalty != 1.0:
            penalty = np.float32(p.repetition_penalty)
            with self._text_counts.of(tokens, path) as (seen, _):
                values = out[seen]
                out[seen] = np.where(values > 0, values / penalty, values * penalty)
        if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0:
            with self._output_counts.of(tokens, path) as (seen, counts):
                out[seen] -= np.float32(p.frequency_penalty) * counts.astype(np.float32) + np.float32(p.presence_penalty)


def _last(tokens: Sequence[int], path: Sequence[int], count: int) -> tuple[int, ...]:
    """The last tokens of `tokens` and then `path`."""
    return tuple([*tokens[max(0, len(tokens) - count) :], *path][-count:]) if count else ()


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on one 64-bit integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of every entry; uint64 products wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_noise(seed: int, index: int, position: int, token_ids: Int64, purpose: int = 0) -> NDArray[np.float64]:
    """Uniform noise in (0, 1), float64, one value per token id; a pure function of its arguments.

    `position` is the absolute position that the token will have in its sequence; `purpose` keeps different uses at one place apart.
    """
    return noise_at(np.uint64(noise_key(seed, index, position, purpose)), token_ids)


def seed_of(request_id: str, index: int = 0) -> int:
    """The seed of prompt `index` of a request that brings none: 63 bits of a hash of its id, so the same wherever and however often it is
    served.
    """
    return int.from_bytes(hashlib.sha256(f"{index}/{request_id}".encode("utf-8", "surrogatepass")).digest()[:8], "little") >> 1


def noise_key(seed: int, index: int, position: int, purpose: int = 0) -> int:
    """What the noise of all token ids at one place has in common, 64 bits."""
    key = _mix(row_key(seed, index) ^ _mix((position * _GOLDEN + 2) & _MASK))
    return _mix(key ^ _mix((purpose * _GOLDEN + 3) & _MASK))


def row_key(seed: int, index: int) -> int:
    """What the noise keys of all places of one text have in common, 64 bits."""
    return _mix(_mix((seed + _GOLDEN) & _MASK) ^ _mix((index * _GOLDEN + 1) & _MASK))


def noise_at(keys: NDArray[np.uint64] | np.uint64, token_ids: Int64) -> NDArray[np.float64]:
    """Uniform noise of token ids at the places of `keys`, which broadcast."""
    bits = _mix_array(keys + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    return np.asarray(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)  # 52 bits: exact, and never 0 or 1


def gumbel_noise(seed: int, index: int, position: int, token_ids: Int64, purpose: int = 0) -> NDArray[np.float64]:
    """Standard Gumbel noise; see `uniform_noise`."""
    return np.asarray(-np.log(-np.log(uniform_noise(seed, index, position, token_ids, purpose))))


def kept_tokens(scaled: Float32, params: SamplingParams) -> Int64:
    """Ids that min_p, top_k and top_p leave, in this order (vLLM's); `scaled` float32 [V] is divided by the temperature already.

    Each filter is a threshold on the value, so equal logits share their fate and the result does not depend on a sort order.
    """
    threshold = np.float32(-np.inf)
    if params.min_p > 0.0:
        threshold = np.float32(scaled.max() + np.log(np.float32(params.min_p)))
    if 0 < params.top_k < len(scaled):
        threshold = max(threshold, np.partition(scaled, len(scaled) - params.top_k)[len(scaled) - params.top_k])
    ids = np.flatnonzero(scaled >= threshold)
    if params.top_p < 1.0:
        descending = -np.sort(-scaled[ids])
        weights = np.exp((descending - descending[0]).astype(np.float64))
        before = np.cumsum(weights) - weights  # mass of all that are larger
        last = int(np.searchsorted(before, params.top_p * weights.sum(), side="left")) - 1
        ids = ids[scaled[ids] >= descending[max(last, 0)]]
    return ids


@dataclass(frozen=True)
class Logprobs:
    """Raw log-probabilities of one place: the token's own with its rank (1 is the likeliest), and the likeliest `top`."""

    token: int
    logprob: float
    rank: int
    top: dict[int, float]


def logprobs_of(logits: Float32, token: int, count: int) -> Logprobs:
    """From raw logits float32 [V], before temperature and filters, as in vLLM."""
    count = min(count, len(logits))
    shifted = logits - logits.max()
    normalised = shifted - np.log(np.exp(shifted).sum())
    best = np.flatnonzero(normalised >= np.partition(normalised, -count)[-count]) if count else np.zeros(0, np.int64)
    best = best[np.argsort(-normalised[best], kind="stable")][:count]
    rank = 1 + int((normalised > normalised[token]).sum())
    return Logprobs(token, float(normalised[token]), rank, {int(t): float(normalised[t]) for t in best})
