"""Steps that are launched before the host knows what the last one has emitted: drafting, the target's pass and the verdict are one CUDA
graph, which finds how long the texts are, and their last two tokens, where the step before has left them on the device.

The host lays out blocks and attention for the longest that each text may be by then. It names tokens by row and distance from the end of
the text, and the device makes positions and slots of that. A draft model reads the last two tokens of a text each time: after a draft that
was accepted as a whole it lacks the keys and values of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.draft import RowVerdict, Verdict
from echelon.model.graphs.buckets import Bucket, bucket_of, common, filled_up
from echelon.model.graphs.buffers import Inputs, Layout, PlanFields, Words
from echelon.model.graphs.graphs import Outputs
from echelon.model.graphs.programs import DRAWN, MOST_TOKENS, Launch
from echelon.model.runner import Runner
from echelon.ops.triton.plan import SPLIT, PlanKey, Tables, plan_tables
from echelon.ops.triton.sample import draw_columns, draw_rows, noise_keys
from echelon.sampling import row_key
from echelon.sequence import Plan, PlannedRow

KNOWN = 2  # last tokens of a text that the device keeps
NUM_COLUMNS = KNOWN + 4  # of a row, int64: place in the step in flight, tokens of its text, the last two, drafts, first token of its own

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """What a graph of a step depends on: room for rows and for each model's passes; are tokens drawn with noise?"""

    num_rows: int
    target: Bucket
    draft: tuple[Bucket, ...]
    is_drawn: bool


@dataclass(frozen=True)
class _Pass:
    """One pass of a model, laid out for the longest texts.

    rows        int64[T]  row of the step that each token belongs to
    offsets     int64[T]  distance from the end of its text: −1 is the last known token, 0 the first drafted one
    logit_rows  int64[R]  tokens whose logits are wanted: of the target all, of a draft model one for every row of the step
    """

    batch: RaggedBatch
    rows: Int64
    offsets: Int64
    logit_rows: Int64
    tables: tuple[Tables, ...]
    bucket: Bucket


@dataclass(frozen=True)
class DeviceStep:
    """A step in flight. `found` int64[B, K + 2], in pinned memory of the host: see `_Step.forward`. The target's pass is the first."""

    plan: Plan
    target: Runner[Any]
    draft: Runner[Any] | None
    found: Tensor
    event: Any
    passes: list[_Pass]

    def verdict(self) -> Verdict:
        """Wait for the device; every row's accepted tokens, and the extra one, −1 where none could be chosen."""
        self.event.synchronize()
        self._count([len(row.sequence) if self.plan.awaits(row) else None for row in self.plan.rows])
        return [
            RowVerdict(row.max_draft_tokens, list(range(count)), tokens[:count], tokens[count])
            for row, (*tokens, count) in zip(self.plan.rows, self.found.tolist(), strict=True)
        ]

    def commit(self, row: PlannedRow, kept: RowVerdict, is_followed: bool) -> None:
        """Of a row without an extra token the last accepted one is fed again, so that the host sees why there is none."""
        num_known = len(row.sequence) + len(kept.path) - (kept.next_token < 0)
        tables = self.target.cache.tables
        (tables.advance if is_followed else tables.commit)(row.sequence.id, num_known)
        if self.draft is not None:
            tables = self.draft.cache.tables
            drafting = len(row.sequence) + row.max_draft_tokens - 1
            num_read = drafting if row.max_draft_tokens else tables.num_cached(row.sequence.id)
            (tables.advance if is_followed else tables.commit)(row.sequence.id, min(num_known, num_read))

    def observe(self, rows: Sequence[PlannedRow], verdict: Verdict) -> None:
        """Nothing to tell: the device drafted."""

    def discard(self) -> None:
        self._count([None] * len(self.plan.rows))

    def _count(self, lengths: Sequence[int | None]) -> None:
        """Enter the passes in the books of their models, the texts having had these lengths; what was fed of a row without is padding."""
        is_real = np.array([n is not None for n in lengths])
        surplus = np.array([row.longest for row in self.plan.rows]) - np.array([n or 0 for n in lengths])
        for runner, one in zip(_runners(self.target, self.draft, self.passes), self.passes, strict=True):
            count = one.batch.num_rows
            kv_lens = np.where(is_real[:count], one.batch.kv_lens.numpy() - surplus[:count], 0)
            batch = replace(one.batch, kv_lens=torch.from_numpy(kv_lens))
            runner.count(batch, int(is_real[one.rows].sum()), one.bucket.num_tokens)


def _runners(target: Runner[Any], draft: Runner[Any] | None, passes: Sequence[_Pass]) -> list[Runner[Any]]:
    """Whose the passes are: the first the target's, all others the draft model's."""
    return [target, *([draft] * (len(passes) - 1) if draft is not None else [])]


class Ahead:
    """Launches steps of a target, and of the draft model that drafts chains for it. Both capture their passes."""

    def __init__(self, target: Runner[Any], draft: Runner[Any] | None) -> None:
        assert target.captured is not None
        self._target, self._draft = target, draft
        self._graphs = target.captured.graphs
        self._state = torch.zeros(1 + KNOWN, MOST_TOKENS, dtype=torch.int64, device=target.cache.device)  # lengths and last tokens of rows

    @torch.inference_mode()
    def launch(self, plan: Plan) -> DeviceStep | None:
        """One step; None where it has to run otherwise, and then nothing has. Rows with longer drafts come first. Slots must have been
        reserved for the longest texts and their drafts.
        """
        rows = plan.rows
        if self._graphs.is_refused or sum(1 + row.max_draft_tokens for row in rows) > MOST_TOKENS:
            return None
        own = self._target_pass(rows)
        drafting = self._draft_passes(rows)
        passes = [own, *drafting]
        runners = list(dict.fromkeys(_runners(self._target, self._draft, passes)))
        is_drawn = any(not row.sequence.params.is_greedy for row in rows)
        shape = Shape(filled_up(len(rows)), own.bucket, tuple(one.bucket for one in drafting), is_drawn)
        for runner in runners:
            runner.cache.apply_copies()
        outputs = self._graphs.run(
            shape,
            lambda: _Step(_Frames(shape, [_Model.of(runner) for runner in runners], self._state.device), self._state),
            lambda step: step.frames.fill(rows, passes),
        )
        if outputs is None:
            return None
        found, state = outputs
        self._state[:, : state.shape[1]].copy_(state)
        host = torch.empty(len(rows), found.shape[1], dtype=torch.int64, pin_memory=True)
        host.copy_(found[: len(rows)], non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return DeviceStep(plan, self._target, self._draft, host, event, passes)

    def _target_pass(self, rows: Sequence[PlannedRow]) -> _Pass:
        spans = [Span(r.sequence.id, r.longest - 1, [0] * (1 + r.max_draft_tokens), 1 + r.max_draft_tokens, r.longest) for r in rows]
        return _laid_out(self._target, rows, spans)

    def _draft_passes(self, rows: Sequence[PlannedRow]) -> list[_Pass]:
        """The first reads what is known, each later one what the one before has chosen; the last drafted token is not read."""
        if self._draft is None:
            return []
        found: list[_Pass] = []
        for place in range(rows[0].max_draft_tokens):
            members = [row for row in rows if row.max_draft_tokens > place]
            new = 1 if place else KNOWN
            one = _laid_out(self._draft, members, [Span(r.sequence.id, r.longest + place - new, [0] * new, 1, r.longest) for r in members])
            logit_rows = np.zeros(len(rows), np.int64)
            logit_rows[: len(members)] = one.logit_rows
            found.append(replace(one, logit_rows=logit_rows, bucket=replace(one.bucket, num_logits=filled_up(len(rows)))))
        if len(found) > 1:
            again = common(one.bucket for one in found[1:])
            found[1:] = [replace(one, bucket=again) for one in found[1:]]
        return found


def _laid_out(runner: Runner[Any], rows: Sequence[PlannedRow], spans: Sequence[Span]) -> _Pass:
    """A pass over the step's first rows, as if their texts were as long as they may be."""
    assert runner.captured is not None
    batch = runner.pack(spans)
    of_token = np.repeat(np.arange(len(rows)), np.diff(batch.indptr.numpy()))
    longest = np.array([row.longest for row in rows])[of_token]
    slack = longest - np.array([row.shortest for row in rows])[of_token]
    tables = tuple(plan_tables(batch, key, slack.astype(np.int32)) for key in runner.captured.keys)
    return _Pass(batch, of_token, batch.positions.numpy() - longest, batch.logit_rows.numpy(), tables, bucket_of(batch, tables))


@dataclass(frozen=True)
class _Model:
    """What a graph needs of a model; not its runner, so that dropping that frees the graph."""

    keys: tuple[PlanKey, ...]
    block_size: int
    null_slots: range
    vocab_size: int
    launch: Launch

    @classmethod
    def of(cls, runner: Runner[Any]) -> _Model:
        assert runner.captured is not None
        cache = runner.captured.cache
        return cls(runner.captured.keys, cache.block_size, cache.null_slots, runner.loaded.vocab_size, runner.captured.launch())


class _Frame:
    """What one pass reads. Padding is no token of any row; its keys and values go to the null slots."""

    def __init__(self, layout: Layout, bucket: Bucket) -> None:
        count = bucket.num_tokens
        self.rows, self.offsets, self.null_slots = (layout.add(count, dtype=torch.int64) for _ in range(3))
        self.logit_rows = layout.add(bucket.num_logits, dtype=torch.int64)
        self.plans = [PlanFields(layout, size, count) for size in bucket.plans]

    def fill(self, words: Words, given: _Pass, null_slots: range) -> None:
        count = given.batch.num_tokens
        slots = np.resize(np.asarray(null_slots), self.null_slots.shape)
        slots[:count] = -1
        offsets = np.full(self.offsets.shape, -1)
        offsets[:count] = given.offsets
        columns = (given.rows, offsets, slots, given.logit_rows)
        for field, column in zip((self.rows, self.offsets, self.null_slots, self.logit_rows), columns, strict=True):
            field.put(words, column)
        for fields, tables in zip(self.plans, given.tables, strict=True):
            fields.fill(words, tables)


class _Frames:
    """The memory that a step reads, filled by one copy: passes, the target's first; the columns of rows; what their tokens are drawn by;
    a block table a model.
    """

    def __init__(self, shape: Shape, models: Sequence[_Model], device: torch.device) -> None:
        layout = Layout()
        self.models, self.num_drafted = models, len(shape.draft)
        self._passes = [_Frame(layout, bucket) for bucket in (shape.target, *shape.draft)]
        self._columns = layout.add(NUM_COLUMNS, shape.num_rows, dtype=torch.int64)
        self._drawn = [layout.add(shape.num_rows, dtype=dtype) for dtype in (*DRAWN, torch.int64)] if shape.is_drawn else []
        splits = (shape.target.num_splits, max((bucket.num_splits for bucket in shape.draft), default=0))
        widths = [-(-count * SPLIT // model.block_size) for count, model in zip(splits, models, strict=False)]
        self._tables = [layout.add(shape.num_rows, width) for width in widths]
        self._memory = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self.columns, self.drawn = self._columns.view(self._memory), [field.view(self._memory) for field in self._drawn]

    def fill(self, rows: Sequence[PlannedRow], passes: Sequence[_Pass]) -> None:
        host = torch.zeros(len(self._memory), dtype=torch.int32, pin_memory=True)
        words = host.numpy()
        for place, (frame, given) in enumerate(zip(self._passes, passes, strict=True)):
            frame.fill(words, given, self._model(place).null_slots)
        counts = [row.max_draft_tokens for row in rows]
        firsts = passes[0].batch.indptr[:-1].tolist()
        known = [row.sequence.tokens[-KNOWN:] for row in rows]
        columns = ([r.pending_row for r in rows], [len(r.sequence) for r in rows], *zip(*known, strict=True), counts, firsts)
        self._columns.put(words, np.array(columns, np.int64))
        if self._drawn:
            samplers = [row.sequence.sampler for row in rows]
            params, keys = [s.params for s in samplers], [row_key(s.seed, s.index) for s in samplers]
            bounds = ([p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params])
            for field, column in zip(self._drawn, draw_columns(*bounds, keys), strict=True):
                field.put(words, column)
        for field, given in zip(self._tables, passes, strict=False):  # of the target, and of the draft model's first pass
            field.put(words, given.batch.block_table.numpy()[:, : field.shape[1]])
        self._memory.copy_(host, non_blocking=True)

    def run(self, place: int, lengths: Tensor, texts: Sequence[Tensor]) -> Tensor:
        """The pass at this place: logits [R, V]. `lengths` int64[B]; `texts` int64[B] each: the last known tokens, and those drafted."""
        model, frame = self._model(place), self._passes[place]
        rows, offsets, null_slots, logit_rows = (
            field.view(self._memory) for field in (frame.rows, frame.offsets, frame.null_slots, frame.logit_rows)
        )
        table, size, is_real = self._tables[min(place, 1)].view(self._memory), model.block_size, null_slots < 0
        positions = torch.where(is_real, lengths[rows] + offsets, 0)
        slots = torch.where(is_real, table[rows, positions // size].long() * size + positions % size, null_slots)
        tokens = torch.stack(list(texts))[offsets + KNOWN, rows]
        tokens = torch.where((tokens >= 0) & (tokens < model.vocab_size), tokens, 0)  # none was chosen, or it is none of this model
        plans = {key: fields.plan(self._memory, table, positions.int()) for key, fields in zip(model.keys, frame.plans, strict=True)}
        logits, _ = model.launch(Inputs(tokens.int(), positions.int(), slots, logit_rows, plans), tokens.int())
        return logits

    def places(self) -> tuple[Tensor, Tensor]:
        """int64[T]: rows and offsets of the target's tokens."""
        frame = self._passes[0]
        return frame.rows.view(self._memory), frame.offsets.view(self._memory)

    def _model(self, place: int) -> _Model:
        return self.models[min(place, 1)]


@dataclass(frozen=True)
class _Step:
    """Draft, verify, and find where the next step begins. It may run twice: what it has found is put into `state` afterwards."""

    frames: _Frames
    state: Tensor

    def forward(self) -> Outputs:
        """int64[B, K + 2]: the target's own tokens and how many drafts equal them; int64[1 + KNOWN, B]: the new state."""
        frames = self.frames
        source, lengths, *known, counts, firsts = frames.columns
        before = torch.where(source >= 0, self.state[:, source.clamp_min(0)], torch.stack([lengths, *known]))
        lengths, *texts = before.unbind()
        keys = self._keys(lengths)
        for place in range(frames.num_drafted):
            logits = frames.run(1 + place, lengths, texts)
            padded = F.pad(logits, (0, frames.models[0].vocab_size - logits.shape[-1]), value=-torch.inf)
            texts.append(self._choose(padded, slice(None), None if keys is None else keys[place]))
        rows, offsets = frames.places()
        chosen = self._choose(frames.run(0, lengths, texts), rows, None if keys is None else keys[offsets + 1, rows])
        at = torch.arange(frames.num_drafted + 1, device=chosen.device)
        own = chosen[(firsts[:, None] + torch.minimum(at, counts[:, None])).clamp_max(len(chosen) - 1)]
        drafted = torch.stack(texts[KNOWN:], 1) if frames.num_drafted else own[:, :0]
        is_kept = (drafted == own[:, :-1]) & (drafted >= 0) & (at[:-1] < counts[:, None])
        accepted = is_kept.long().cumprod(1).sum(1, keepdim=True)
        emitted = torch.cat([texts[KNOWN - 1][:, None], own], 1)
        last = emitted.gather(1, torch.cat([accepted, accepted + 1], 1))
        return torch.cat([own, accepted], 1), torch.stack([lengths + accepted[:, 0] + 1, *last.unbind(1)])

    def _keys(self, lengths: Tensor) -> Tensor | None:
        """int64[K + 1, B]: of the noise that the tokens after the known ones are drawn with."""
        if not self.frames.drawn:
            return None
        places = torch.arange(self.frames.num_drafted + 1, device=lengths.device)
        return noise_keys(self.frames.drawn[-1], lengths + places[:, None])

    def _choose(self, logits: Tensor, rows: Tensor | slice, keys: Tensor | None) -> Tensor:
        """int64[R]: a token for each row of logits [R, V], which belongs to one of `rows`; −1 where there is none."""
        if keys is None:
            best = logits.argmax(-1)  # NaN is taken for the largest
            return torch.where(logits.gather(1, best[:, None])[:, 0].isfinite(), best, -1)
        temperature, top_k, top_p, log_min_p, _ = (column[rows] for column in self.frames.drawn)
        return draw_rows(logits.float(), temperature, top_k, top_p, log_min_p, keys)
