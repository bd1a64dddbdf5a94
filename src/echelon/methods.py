"""The table of drafting methods. A new one is a file of its own, and a line here: what makes it, what it needs, what it can do.

Settings are checked against this table, and the engine tells methods apart by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from importlib import import_module
from typing import Any, Literal

from echelon.trees import EAGLE_25, MEDUSA_63, SHARPNESS, BestFirst, Growth, LevelByLevel, Path

ALIASES = {"llma": "ngram"}


class Can(Flag):
    """What a method supports besides chains that are accepted exactly."""

    CHAINS = 0
    TREES = auto()  # drafts trees
    REJECTION = auto()  # `acceptance="rejection"`: its draft is drawn from probabilities that it keeps
    CONFIDENCE = auto()  # `confidence_threshold`: it has probabilities
    RUN_AHEAD = auto()  # a device can draft chains without the host, so that steps are launched early
    TRAIN = auto()  # `echelon train` makes what it drafts with


def eagle2(sharpness: float) -> Callable[[int, float, int], Growth]:
    """EAGLE-2's dynamic trees; `sharpness` multiplies logits before they become scores."""
    return lambda top_k, _top_p, depth: BestFirst(top_k, depth, sharpness)


EAGLE2 = eagle2(SHARPNESS)


def clover(top_k: int, top_p: float, depth: int) -> Growth:
    """Clover's dynamic trees."""
    return LevelByLevel(top_p, top_k, depth)


@dataclass(frozen=True)
class DraftingMethod:
    """One way of drafting.

    drafter  "module:function" that makes its drafter from (EngineConfig, SpeculativeConfig, Storage); imported when it is first used
    can      what it supports
    needs    what `draft_model` or `draft_head` of an `LLM`, or the key `model`, must name
    head     "module:class" of its network, where it needs a head
    paths    tree of `tree="static"` without `speculative_token_tree`
    dynamic  (tree_top_k, tree_top_p, depth) → how `tree="dynamic"` grows
    """

    drafter: str
    can: Can = Can.CHAINS
    needs: Literal["nothing", "model", "head"] = "nothing"
    head: str | None = None
    paths: tuple[Path, ...] = EAGLE_25
    dynamic: Callable[[int, float, int], Growth] = EAGLE2

    @property
    def build(self) -> Callable[..., Any]:
        """The function that makes the drafter."""
        function: Callable[..., Any] = _imported(self.drafter)
        return function


def of_head(head: str, **options: Any) -> DraftingMethod:
    """A method that drafts with a trained head."""
    return DraftingMethod("echelon.build:head_drafter", Can.TREES | Can.CONFIDENCE | Can.TRAIN, "head", head, **options)


METHODS = {
    "ngram": DraftingMethod("echelon.build:ngram_drafter", Can.REJECTION),
    "draft_model": DraftingMethod("echelon.build:draft_model_drafter", ~Can.CHAINS, "model"),
    "medusa": of_head("echelon.heads.medusa:MedusaHead", paths=MEDUSA_63, dynamic=eagle2(1.0)),
    "clover": of_head("echelon.heads.clover:CloverHead", dynamic=clover),
    "clover2": of_head("echelon.heads.clover2:Clover2Head", dynamic=clover),
    "eagle": of_head("echelon.heads.eagle:EagleHead"),
    "eagle3": of_head("echelon.heads.eagle3:Eagle3Head"),
    "scylla": of_head("echelon.heads.eagle:ScyllaHead"),
}


def method_names(can: Can = Can.CHAINS, needs: str | None = None) -> list[str]:
    """Names of the methods that can do all of `can`, of one need or of any."""
    return [name for name, m in METHODS.items() if can in m.can and needs in (None, m.needs)]


def head_class(method: str) -> Any:
    """The network, a `heads.base.Head`, of a method that drafts with a head."""
    return _imported(METHODS[method].head or "")


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
