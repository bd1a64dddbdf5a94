"""Expected tokens a second of a model on several devices: roofline times of passes, run through the stages as they would run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from echelon.estimate.devices import Device
from echelon.estimate.drafting import DraftingCost
from echelon.estimate.layout import Pass, StagePart
from echelon.estimate.pipeline import Visit, run_on


@dataclass(frozen=True)
class Speed:
    """A step of `rows` rows in `lanes`, which are under way at the same time: seconds of a round of all, tokens a second, the parts of one
    lane's pass in seconds, and the share of the time that each stage is at work.
    """

    rows: int
    lanes: int
    seconds: float
    tokens_per_second: float
    terms: dict[str, float] = field(hash=False)
    busy: tuple[float, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """A model on devices of one kind.

    stages      what each rank of each stage has
    hidden      size of a hidden state
    bytes_each  of a number of weights and activations
    """

    stages: Sequence[Sequence[StagePart]]
    device: Device
    dtype: str
    hidden: int
    bytes_each: int

    @cached_property
    def num_devices(self) -> int:
        """Of all stages."""
        return sum(len(ranks) for ranks in self.stages)

    def terms(self, stage: int, run: Pass) -> dict[str, float]:
        """Seconds by part of a pass through a stage's layers, on its slowest rank; of the first stage embeddings cost nothing."""
        return self._slowest([part.held.seconds(self.device, self.dtype, self.bytes_each, run, part.rank) for part in self.stages[stage]])

    def output_terms(self, run: Pass) -> dict[str, float]:
        """Seconds of the output layer, on the first stage."""
        found = [part.output.seconds(self.device, self.dtype, self.bytes_each, run, part.rank) for part in self.stages[0]]
        return {"output layer" if name == "linear layers" else name: s for name, s in self._slowest(found).items()}

    @staticmethod
    def _slowest(found: list[dict[str, float]]) -> dict[str, float]:
        return max(found, key=lambda terms: sum(terms.values()))

    def pass_terms(self, run: Pass) -> dict[str, float]:
        """Seconds by part of a pass through all stages, one after the other."""
        found: dict[str, float] = {}
        between = len(self.stages) * self.seconds_between(run) if len(self.stages) > 1 else 0.0
        parts = [*(self.terms(stage, run) for stage in range(len(self.stages))), self.output_terms(run), {"between stages": between}]
        for name, seconds in (item for terms in parts for item in terms.items() if item[1]):
            found[name] = found.get(name, 0.0) + seconds
        return found

    def seconds_between(self, run: Pass) -> float:
        """Until the hidden states of a pass have come from one stage to the next."""
        return self.device.seconds_to_send(run.num_tokens * self.hidden * self.bytes_each)

    def draft_seconds(self, drafting: DraftingCost | None, rows: int) -> float:
        """Seconds of drafting for so many rows, on the engine's device."""
        return 0.0 if drafting is None else drafting.seconds(self.device, self.dtype, self.bytes_each, rows)

    def visits(self, rows: int, tokens: float, context: int) -> list[Visit]:
        """A lane's way through the stages and back, `tokens` of each of its rows."""
        run = Pass(rows, tokens, context)
        travel = self.seconds_between(run) if len(self.stages) > 1 else 0.0
        return [Visit(stage, sum(self.terms(stage, run).values()), travel) for stage in range(len(self.stages))]

    def speed(self, rows: int, context: int, drafting: DraftingCost | None = None, lanes: int | None = None) -> Speed:
        """The speed in so many lanes, or in as many as there are stages."""
        lanes = lanes or min(rows, len(self.stages))
        sizes = [rows * (i + 1) // lanes - rows * i // lanes for i in range(lanes)]
        tokens, emitted = (1 + drafting.drafted, drafting.emitted) if drafting is not None else (1, 1.0)
        seconds, busy = self.run_step([self._round(size, tokens, context, drafting) for size in sizes])
        terms = self.pass_terms(Pass(sizes[-1], tokens, context))
        if drafting is not None:
            terms = {"drafting": self.draft_seconds(drafting, sizes[-1])} | terms
        return Speed(rows, lanes, seconds, rows * emitted / seconds, terms, busy)

    def _round(self, rows: int, tokens: float, context: int, drafting: DraftingCost | None) -> list[Visit]:
        """A lane's round: its rows are drafted for, go through the stages, and have the output layer run for them."""
        output = sum(self.output_terms(Pass(rows, tokens, context)).values())
        return [Visit(0, self.draft_seconds(drafting, rows)), *self.visits(rows, tokens, context), Visit(0, output)]

    def run_step(self, rounds: list[list[Visit]]) -> tuple[float, tuple[float, ...]]:
        """Seconds of a round of each lane, none waiting for the others, and the share of them that each stage works."""
        ran = run_on(rounds)
        return ran.seconds, ran.busy

    def fastest(self, rows: int, context: int, draftings: Sequence[DraftingCost]) -> tuple[DraftingCost, Speed]:
        """Of several drafts the one with which most tokens come a second."""
        found = [(drafting, self.speed(rows, context, drafting)) for drafting in draftings]
        return max(found, key=lambda pair: pair[1].tokens_per_second)
