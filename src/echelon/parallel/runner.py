"""The target's runner where several ranks run every pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.model.runner import ModelRunner
from echelon.parallel.group import RankGroup
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
    """The same with the target on all ranks, which have room for as many tokens by then."""
    target: Any = storage.runners[0]
    cache = target.cache
    group.tell({"num_blocks": cache.num_blocks, "block_size": cache.block_size, "is_rounded": cache.is_rounded})
    group.answers()
    return replace(storage, runners=[SplitRunner(target, group), *storage.runners[1:]], close_ranks=group.close)
