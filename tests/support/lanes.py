"""Steps of several lanes in one process: passes are run when they begin, and found when they are waited for."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from echelon import LLM
from echelon.adaptive.controller import BatchController
from echelon.adaptive.lanes import LaneController
from echelon.drafters.base import LevelDrafter


@dataclass
class Noted:
    """What was under way at most, and rows of each pass."""

    under_way: deque[int] = field(default_factory=deque)
    most: int = 0
    num_rows: list[int] = field(default_factory=list)


def in_lanes(llm: LLM, count: int, rng: random.Random | None = None) -> Noted:
    """Let so many steps be under way at a time; with `rng`, from none to so many, as it says before every step."""
    target: Any = llm.engine.target
    noted, run, number = Noted(), target.run, 0

    def begin(batch: Any) -> Callable[[], tuple[Tensor, Tensor | None]]:
        nonlocal number
        number += 1
        own = number
        noted.under_way.append(own)
        noted.most = max(noted.most, len(noted.under_way))
        noted.num_rows.append(len(batch.logit_indptr) - 1)
        found = [None if part is None else part.clone() for part in run(batch)]

        def finish() -> Any:
            while (first := noted.under_way.popleft()) != own:  # of which no row is awaited any more
                assert first < own, "passes are waited for in order"
            return tuple(found)

        return finish

    target.begin, target.num_lanes = begin, lambda _: rng.randint(1, count) if rng else count
    controller = llm.engine.controller
    if isinstance(controller, BatchController):
        llm.engine.controller = LaneController(controller.table, controller._corrects)
        llm.engine.scheduler.piece_sizes = llm.engine.controller.piece_sizes
        drafter = llm.engine.drafter.unguarded
        if isinstance(drafter, LevelDrafter):
            drafter.pace = llm.engine.controller.goes_on
    return noted
