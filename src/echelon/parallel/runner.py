"""The target's runner where several ranks run every pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.model.hidden_states import LAYER
from echelon.model.runner import ModelRunner
from echelon.parallel.group import RankGroup
from echelon.parallel.splits import STAGES
from echelon.parallel.stages import FirstStage
from echelon.storage import Storage


class SplitRunner(ModelRunner):
    """Runs a batch on all ranks; logits and hidden states are rank 0's. Blocks and rows are its own business."""

    def __init__(self, runner: ModelRunner, group: RankGroup) -> None:
        super().__init__(runner.loaded, runner.cache)
        self.hidden_state_reader, self.group = runner.hidden_state_reader, group

    def run(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        with self.group.running(batch, self.cache.tables.copies):
            return super().run(batch)


def split_storage(storage: Storage, group: RankGroup) -> Storage:
    """The same with the target on all ranks, which have room for as many tokens by then, and know whose inputs rank 0 wants to see."""
    target: Any = storage.runners[0]
    cache, reader = target.cache, target.hidden_state_reader
    names = reader.names if reader is not None else ()
    wanted = [int(name.removeprefix(LAYER)) for name in names if name.startswith(LAYER)]
    group.tell({"num_blocks": cache.num_blocks, "block_size": cache.block_size, "is_rounded": cache.is_rounded, "wanted": wanted})
    group.answers()
    runner = FirstStage(target, group, wanted) if group.setting == STAGES else SplitRunner(target, group)
    return replace(storage, runners=[runner, *storage.runners[1:]], check_ranks=group.check, close_ranks=group.close)
