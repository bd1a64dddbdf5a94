"""A pass through stages: micro-batches of whole rows go from one to the next, and what the last gives comes back to rank 0.

A token's numbers do not depend on what shares its batch, so that a pass may be cut between any two rows. While one micro-batch is in a
stage, another is in the stage before: of the same pass, where it is a large one, or of another, which was begun while rank 0 waits for the
first. Rank 0 hands on a micro-batch when fewer than the other stages' number are under way: some stage is always free to take one, so that
nobody waits in a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.kv.cache import KVCache
from echelon.model.hidden_states import LAYER, HiddenStateReader
from echelon.model.load.loading import LoadedModel
from echelon.model.runner import ModelRunner, forward
from echelon.parallel.group import NUM_SENT, RankGroup
from echelon.parallel.pass_plan import PassPlan

FEWEST_TOKENS = 64  # of a micro-batch: every one reads all weights again, which takes longer than fewer tokens do
FEWEST_IN_LANE = 8  # tokens, where all ranks read their weights through one memory


def row_ends(batch: RaggedBatch, most: int) -> list[int]:
    """Where a batch is cut into at most so many micro-batches of about equally many tokens: of each the row after its last."""
    count = max(1, min(most, batch.num_tokens // FEWEST_TOKENS))
    wanted = batch.num_tokens * np.arange(1, count + 1) / count
    ends: list[int] = np.unique(np.searchsorted(batch.indptr[1:].numpy(), wanted) + 1).tolist()
    return ends


class StageLink(Protocol):
    """The way from the stage before and to the one after."""

    def send(self, states: Tensor, plan_hash: int) -> None:
        """Hand on states [T, columns] in the pass of a plan; returns before they have come."""

    def receive(self, into: Tensor, plan_hash: int) -> Tensor:
        """Wait for as many states [T, columns] as `into` holds, which is returned."""

    def fits(self, states: Tensor) -> bool:
        """Can such states be handed on without anybody to take them? So can NUM_SENT of them."""


class StageRunner(ModelRunner):
    """Runs one stage's layers. `wanted`: numbers of layers whose inputs go to rank 0, for what drafts from them.

    From stage to stage go states [T, (1 + n) · d]: hidden states after the stage's last layer, and those n inputs that are known by then.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, handover: StageLink, wanted: Sequence[int]) -> None:
        super().__init__(loaded, cache)
        assert loaded.stage is not None
        self.stage, self.handover = loaded.stage, handover
        self.wanted = sorted({number for number in wanted if number})  # the input of layer 0 is rank 0's own
        first = self.stage.layers.start
        own = [f"{LAYER}{number - first}" for number in self.wanted if number in self.stage.layers]
        self._own = HiddenStateReader(loaded.model, own) if own else None
        self._width = int(loaded.model.config.get_text_config().hidden_size)

    def room(self, num_tokens: int, layer: int) -> Tensor:
        """Memory for the states of so many tokens before a layer."""
        return torch.empty(num_tokens, (1 + sum(n < layer for n in self.wanted)) * self._width, dtype=self.loaded.model.dtype)

    def parts(self, batch: RaggedBatch, ends: Sequence[int]) -> list[RaggedBatch]:
        """The micro-batches that `row_ends` has named."""
        return [batch.rows(first, last) for first, last in pairwise([0, *ends])]

    def through(self, part: RaggedBatch, states: Tensor | None) -> Tensor:
        """Run this stage's layers over a micro-batch, on the states that the stage before has handed on; what is to be handed on."""
        entering = None if states is None else states[:, : self._width].contiguous()
        with self.stage.inside(entering):
            inputs = part.tokens, self.positions(part), part.logit_rows, self.attention(part)
            _, own = forward(self.loaded, self._own, *inputs)
        carried = [] if states is None else [states[:, self._width :]]
        known = [*carried, *([] if own is None else [own])]
        return torch.cat([self.stage.leaving, *known], -1) if known else self.stage.leaving


class WorkerStage(StageRunner):
    """Any stage but the first."""

    @torch.inference_mode()
    def run_plan(self, plan: PassPlan) -> None:
        """Run one pass."""
        self.cache.apply_copies()
        for part in self.parts(plan.batch, plan.ends):
            entering = self.handover.receive(self.room(part.num_tokens, self.stage.layers.start), plan.hash)
            self.handover.send(self.through(part, entering), plan.hash)


class FirstStage(StageRunner):
    """Rank 0's, with what is before and after all layers; blocks and rows are its own business."""

    def __init__(self, runner: ModelRunner, group: RankGroup, wanted: Sequence[int]) -> None:
        super().__init__(runner.loaded, runner.cache, group.memory, wanted)
        self.hidden_state_reader, self.group = runner.hidden_state_reader, group
        self._under_way: deque[tuple[int, Tensor]] = deque()  # of micro-batches in order: the plan's hash, and room for their states

    def num_lanes(self, num_tokens: int) -> int:
        return max(1, min(self.group.most_at_work, num_tokens // (FEWEST_IN_LANE if self.group.is_one_machine else 1)))

    @torch.inference_mode()
    def run(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        return self.begin(batch)()

    @torch.inference_mode()
    def begin(self, batch: RaggedBatch) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Run the first layers. While the other ranks are told, none of them may wait for this one to take what it hands on."""
        ends = row_ends(batch, self.stage.size)
        parts, whole = self.parts(batch, ends), self.room(batch.num_tokens, self.stage.num_layers)
        with self.group.bound():
            while len(self._under_way) >= NUM_SENT or not all(self.handover.fits(room) for _, room in self._under_way):
                self._receive()
        with self.group.running(batch, self.cache.tables.copies, ends) as plan_hash:
            self.cache.apply_copies()
            for part, room in zip(parts, torch.split(whole, [part.num_tokens for part in parts]), strict=True):
                states = self.through(part, None)
                while len(self._under_way) >= self.stage.size - 1:
                    self._receive()
                self.handover.send(states, plan_hash)
                self._under_way.append((plan_hash, room))
        return partial(self._finished, batch, plan_hash, whole)

    @torch.inference_mode()
    def _finished(self, batch: RaggedBatch, plan_hash: int, whole: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits and hidden states from the states [T, columns] of all tokens behind the last layer, once they have come."""
        with self.group.bound():
            while any(awaited == plan_hash for awaited, _ in self._under_way):
                self._receive()
            states = torch.split(whole, self._width, -1)
            found = dict(zip([self.stage.num_layers, *self.wanted], states, strict=True))
            inputs = batch.tokens, self.positions(batch), batch.logit_rows, self.attention(batch)
            with self.stage.behind(found):
                logits, hidden_states = forward(self.loaded, self.hidden_state_reader, *inputs)
        self.count(batch, batch.num_tokens)
        return logits, hidden_states

    def _receive(self) -> None:
        """Wait for the micro-batch that is the first under way."""
        plan_hash, room = self._under_way.popleft()
        self.handover.receive(room, plan_hash)
