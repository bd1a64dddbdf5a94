"""The ways in which a model is split among ranks, by the setting that asks for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from echelon.config import RANKS
from echelon.model.load.loading import LoadedModel, load_share, load_stage
from echelon.model.patches.split import Share
from echelon.model.patches.stages import Stage
from echelon.parallel.exchange import SharedExchange
from echelon.parallel.handover import Handover
from echelon.parallel.messages import GroupExchange, GroupHandover, RankLink
from echelon.parallel.rank_memory import RankMemory

TENSOR, STAGES = RANKS


def _share(memory: Any, name: str, dtype: str, quantization: str | None) -> LoadedModel:
    return load_share(name, Share(memory), dtype, quantization)


def _stage(memory: Any, name: str, dtype: str, quantization: str | None) -> LoadedModel:
    return load_stage(name, Stage(memory.rank, memory.size), dtype, quantization)


class Split(NamedTuple):
    """How ranks reach one another in the memory of one machine, or by gloo, and what loads a rank's part: (the way there, name, dtype,
    quantization) → model.
    """

    memory: type[RankMemory]
    link: type[RankLink]
    load: Callable[[Any, str, str, str | None], LoadedModel]


SPLITS = {TENSOR: Split(SharedExchange, GroupExchange, _share), STAGES: Split(Handover, GroupHandover, _stage)}
