"""Settings that fit a budget of memory: what costs the user least goes first.

The order is SpecMemo's: speculation before quality, quality before the conversation. Kept prefixes go first, then nodes of a draft (never
the width of its first level), heads of Medusa, bits of keys and values, bits of weights, and at last rows and the length of a text. What a
user has set stays as it is. A smaller budget never gives more rows, longer texts or more bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Set
from dataclasses import dataclass
from shlex import quote
from typing import Any

from echelon.config import EngineConfig
from echelon.errors import ConfigError
from echelon.memory.plan import MemoryPlan
from echelon.methods import head_class
from echelon.sizes import gibibytes
from echelon.speculative_config import SpeculativeConfig

PLANNED_ROWS, PLANNED_LEN = 4, 4096  # conversations, and tokens of each, that are kept for a user who has asked for no other
LEAST_LEN = 128  # tokens of a text, below which a budget is refused
NODES, CHAIN = (44, 32, 24, 16), (6, 5, 4, 3, 2, 1)  # drafted tokens of a row; 44 is SpecMemo's best tree, 16 its smallest
DEPTHS = (4, 3, 2)  # networks of a head that has one for each place of a draft
KEPT = {"dtype", "strategy", "pad", "grouping", "group_window", "refill", "block_size"}  # never touched

Served = tuple[EngineConfig, SpeculativeConfig | None]
Choice = tuple[str, str, dict[str, Any], dict[str, Any]]  # what is shed, what that loses, and the settings of engine and drafter
# (settings, what drafts) → the plan of an engine with them
PlanOf = Callable[[EngineConfig, SpeculativeConfig | None], MemoryPlan]
# (settings before, and after something is shed) → what that does to the speed
SpeedOf = Callable[[Served, Served], str]


@dataclass(frozen=True)
class Rung:
    """Something shed: what, how many bytes that frees, what is lost by it, and what is expected of the speed."""

    what: str
    freed: int
    loses: str
    speed: str

    def __str__(self) -> str:
        return f"{self.what}: {gibibytes(self.freed)} freed; {self.loses}; {self.speed}"


@dataclass(frozen=True)
class Fitting:
    """Settings that fit `budget` bytes, their plan, and what was shed for it."""

    config: EngineConfig
    spec: SpeculativeConfig | None
    plan: MemoryPlan
    budget: int
    rungs: tuple[Rung, ...]
    changed: tuple[str, ...]  # settings that differ from what was asked

    def flags(self, known: Container[str] = tuple(EngineConfig.model_fields)) -> list[str]:
        """The command-line options that say the same without a budget, for a verb with options for the settings `known`."""
        found = []
        for name in self.changed:
            value, flag = getattr(self.config, name), name.replace("_", "-")
            if name in known:
                found.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")
        if self.spec is not None:
            given = self.spec.model_dump(include=self.spec.model_fields_set - {"method"}, mode="json")
            found += [f"--speculative-config.{key} {quote(_word(value))}" for key, value in {"method": self.spec.method, **given}.items()]
        return found

    def lines(self, known: Container[str] = tuple(EngineConfig.model_fields)) -> list[str]:
        """What was shed, what fits, and the equivalent flags, a line each."""
        rows, tokens = self.config.max_num_seqs, self.config.max_model_len
        fits = f"{gibibytes(self.plan.total_bytes)} of {gibibytes(self.budget)}: {_rows(rows)} of {tokens:,} tokens"
        return [*map(str, self.rungs), fits, f"the same without a budget: {' '.join(self.flags(known))}"]


def fitted(
    config: EngineConfig,
    spec: SpeculativeConfig | None,
    budget: int,
    plan_of: PlanOf,
    context: int,
    may_round: Set[str],
    speed_of: SpeedOf,
) -> Fitting:
    """Settings that fit `budget` bytes. `context`: the model's own, in tokens; `may_round`: settings whose numbers can be rounded here.

    Raises
    ------
    ConfigError  nothing does, with the largest length and number of rows that would; or a length beyond the context is asked for
    """
    asked = config.model_copy(update={"memory": None, "gpu_memory_utilization": None})
    free = set(EngineConfig.model_fields) - config.model_fields_set - KEPT
    rows = min(PLANNED_ROWS, asked.max_num_seqs) if "max_num_seqs" in free else asked.max_num_seqs
    length = min(PLANNED_LEN, context) if "max_model_len" in free else asked.model_len(context)
    walk = _Walk(budget, plan_of, speed_of, _sized(asked, rows, length), spec)
    if walk.fits:
        walk.config = _grown(walk, free, context, asked.max_num_seqs)
    else:
        walk.descend(_ladder(walk.config, spec, free, may_round))
        walk.restore(asked, spec)
    plan = walk.plan
    if plan.total_bytes > budget:
        raise _refusal(walk, free)
    pinned = walk.config.model_copy(update={"kv_cache_memory_bytes": plan.pool.kv_bytes})
    changed = tuple(n for n in EngineConfig.model_fields if getattr(pinned, n) != getattr(asked, n) or n in _ALWAYS)
    return Fitting(pinned, walk.spec, plan, budget, tuple(rung for rung, _, _ in walk.shed), changed)


class _Walk:
    """Settings on their way down the ladder."""

    def __init__(self, budget: int, plan_of: PlanOf, speed_of: SpeedOf, config: EngineConfig, spec: SpeculativeConfig | None) -> None:
        self.budget, self.plan_of, self.speed_of, self.config, self.spec = budget, plan_of, speed_of, config, spec
        self.shed: list[tuple[Rung, dict[str, Any], dict[str, Any]]] = []  # with the settings of engine and drafter that it changed

    @property
    def plan(self) -> MemoryPlan:
        return self.plan_of(self.config, self.spec)

    @property
    def fits(self) -> bool:
        return self.plan.total_bytes <= self.budget

    def needs(self, rows: int, length: int) -> int:
        """Bytes of an engine with other rows."""
        return self.plan_of(_sized(self.config, rows, length), self.spec).total_bytes

    def descend(self, ladder: Iterator[list[Choice]]) -> None:
        """Of each rung the mildest choice that fits, or else the one that frees most, until something fits."""
        for choices in ladder:
            before = best = self.plan.total_bytes
            taken = None
            for what, loses, settings, drafts in choices:
                changed = self.config.model_copy(update=settings), _drafting(self.spec, drafts)
                found = self.plan_of(*changed).total_bytes
                if found < best:
                    speed = self.speed_of((self.config, self.spec), changed)
                    best, taken = found, (Rung(what, before - found, loses, speed), settings, drafts)
                if found <= self.budget:
                    break
            if taken is not None:
                self.shed.append(taken)
                self.config, self.spec = self.config.model_copy(update=taken[1]), _drafting(self.spec, taken[2])
            if best <= self.budget:
                return

    def restore(self, asked: EngineConfig, spec: SpeculativeConfig | None) -> None:
        """What drafts, and then kept prefixes, were given up in vain where a rung below has freed enough for them."""
        if not self.fits:
            return
        prefixes = self.config.model_copy(update={"enable_prefix_caching": asked.enable_prefix_caching})
        for changed in ((prefixes, self.spec), (self.config, spec), (prefixes, spec)):  # the last that fits
            if self.plan_of(*changed).total_bytes <= self.budget:
                self.config, self.spec = changed
        is_kept = self.config.enable_prefix_caching == asked.enable_prefix_caching
        self.shed = [
            (rung, settings, drafts)
            for rung, settings, drafts in self.shed
            if not (drafts and self.spec == spec) and not ("enable_prefix_caching" in settings and is_kept)
        ]


def _drafting(spec: SpeculativeConfig | None, drafts: dict[str, Any]) -> SpeculativeConfig | None:
    return spec.model_copy(update=drafts) if spec is not None and drafts else spec


_ALWAYS = ("max_num_seqs", "max_model_len", "kv_cache_memory_bytes")


def _ladder(config: EngineConfig, spec: SpeculativeConfig | None, free: set[str], may_round: Set[str]) -> Iterator[list[Choice]]:
    """Rungs from the first, each a list of choices from the mildest."""
    if "enable_prefix_caching" in free and config.enable_prefix_caching:
        yield [("no prefix cache", "texts that begin alike are read each time", {"enable_prefix_caching": False}, {})]
    if spec is not None:
        yield from _fewer_nodes(spec)
    if "kv_cache_dtype" in free & may_round:
        yield [("keys and values in 8 bits", "attention rounds: below 0.1 % of loss", {"kv_cache_dtype": "int8"}, {})]
    if "quantization" in free & may_round:
        ways = (
            ("int8", "8 bits", "about 0.1 % of loss"),
            ("int4", "4 bits", "about 1 % of loss"),
        )
        for name, bits, loses in ways:
            if spec is not None and spec.own_copy == name:  # a model has more bits than its own copy
                break
            yield [(f"weights in {bits}", loses, {"quantization": name}, {})]
    if "max_num_seqs" in free:
        yield [
            (f"{_rows(rows)} at once", f"{rows / config.max_num_seqs:.0%} of the conversations run at once", {"max_num_seqs": rows}, {})
            for rows in range(config.max_num_seqs - 1, 0, -1)
        ]
    if "max_model_len" in free and config.max_model_len is not None:
        lengths = range((config.max_model_len - 1) // 64 * 64, LEAST_LEN - 1, -64)
        yield [(f"texts of {n:,} tokens", f"{n / config.max_model_len:.0%} of the planned length", _length(free, n), {}) for n in lengths]


def _length(free: set[str], length: int) -> dict[str, Any]:
    """Rows have gone before the length: one is left where they are free."""
    return {"max_model_len": length} | ({"max_num_seqs": 1} if "max_num_seqs" in free else {})


def _fewer_nodes(spec: SpeculativeConfig) -> Iterator[list[Choice]]:
    """Fewer drafted tokens a row, and fewer heads, where the user has named no number."""
    if not spec.is_adaptive or spec.max_speculative_tokens is not None:
        return
    what = "nodes of a tree" if spec.grows_trees else "drafted tokens at most"
    fewer = [n for n in (NODES if spec.grows_trees else CHAIN) if n < spec.most_tokens]
    yield [
        (f"{n} {what}", f"at most {n} of {spec.most_tokens} are verified a row and step", {}, {"max_speculative_tokens": n}) for n in fewer
    ]
    if spec.is_head and head_class(spec.method).is_by_place and spec.tree == "dynamic" and "tree_depth" not in spec.model_fields_set:
        depths = [n for n in DEPTHS if n < spec.tree_depth]
        yield [(f"{n} heads", f"at most {n + 1} tokens a step", {}, {"tree_depth": n}) for n in depths]


def _sized(config: EngineConfig, rows: int, length: int) -> EngineConfig:
    return config.model_copy(update={"max_num_seqs": rows, "max_model_len": length})


def _grown(walk: _Walk, free: set[str], context: int, most_rows: int) -> EngineConfig:
    """Longer texts, up to the model's context, and then more rows: of these what the user has not named."""
    length, rows = walk.config.max_model_len or context, walk.config.max_num_seqs
    if "max_model_len" in free:
        length = _largest(length, context, lambda n: walk.needs(rows, n) <= walk.budget)
    if "max_num_seqs" in free and (length == context or "max_model_len" not in free):
        rows = _largest(rows, most_rows, lambda n: walk.needs(n, length) <= walk.budget)
    return _sized(walk.config, rows, length)


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `least`, which fits, to `most` that does."""
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _refusal(walk: _Walk, free: set[str]) -> ConfigError:
    """Why nothing fits, and what would."""
    rows, length, budget = walk.config.max_num_seqs, walk.config.max_model_len or LEAST_LEN, walk.budget
    shortest = min(LEAST_LEN, length)
    least = walk.needs(1, shortest)
    if least > budget:
        smaller = "" if "quantization" in free or walk.config.quantization == "int4" else ", leave quantization out"
        return ConfigError(
            f"{gibibytes(budget)} of memory hold no engine: one row of {shortest} tokens needs {gibibytes(least)}; give at least "
            f"that{smaller}, or a smaller model"
        )

    def longest(count: int) -> int:
        return _largest(shortest, length, lambda n: walk.needs(count, n) <= budget)

    fewer = max((n for n in range(1, rows) if walk.needs(n, length) <= budget), default=0)
    ways = [(fewer, length)] if fewer else [(1, longest(1))] if rows > 1 else []
    if walk.needs(rows, shortest) <= budget:
        ways.append((rows, longest(rows)))
    would = " or ".join(f"{_rows(count)} of {tokens:,} tokens" for count, tokens in ways)
    needed = gibibytes(walk.needs(rows, length))
    return ConfigError(f"{_rows(rows)} of {length:,} tokens need {needed}, and there are {gibibytes(budget)}; {would} would fit")


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
