"""Steps that are launched before the host knows what the last one has emitted: drafting, the target's pass and the verdict are one CUDA
graph, which finds how long the texts are, and their last two tokens, where the step before has left them on the device.

The host lays out blocks and attention for the longest that each text may be by then. It names tokens by row and distance from the end of
the text, and the device makes positions and slots of that. A draft model reads the last two tokens of a text each time: after a draft that
was accepted as a whole it lacks the keys and values of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.draft import RowVerdict, Verdict
from echelon.model.graphs.buckets import Bucket, bucket_of, common, filled_up
from echelon.model.graphs.buffers import Buffers, PassValues, table_width
from echelon.model.graphs.graphs import Outputs
from echelon.model.graphs.programs import DRAWN, MOST_TOKENS, Captured, Launch
from echelon.model.runner import Runner
from echelon.ops.triton.plan import PlanKey, plan_tables
from echelon.ops.triton.sample import draw_columns, draw_rows, noise_keys
from echelon.sampling import row_key
from echelon.sequence import Plan, PlannedRow
from echelon.stats import StepTimer

KNOWN = 2  # last tokens of a text that the device keeps
NUM_COLUMNS = KNOWN + 4  # of a row, int64: index in the step in flight, tokens of its text, the last two, drafts, first token of its own


@dataclass(frozen=True)
class Shape:
    """What a graph of a step depends on: room for rows and for each model's passes; are tokens drawn with noise?"""

    num_rows: int
    target: Bucket
    draft: tuple[Bucket, ...]
    is_drawn: bool


@dataclass(frozen=True)
class DevicePass:
    """One pass of a model, laid out for the longest texts. Columns of its values, int64[T]:

    row of the step that each token belongs to
    distance from the end of its text: −1 is the last known token, 0 the first drafted one
    −1, and for padding, which is no token of any row, the null slots that its keys and values go to

    Of the target all tokens' logits are wanted, of a draft model one for every row of the step.
    """

    runner: Runner[Any]
    batch: RaggedBatch
    values: PassValues[NDArray[Any]]
    bucket: Bucket


@dataclass(frozen=True)
class DeviceStep:
    """A step in flight. `found` int64[B, K + 2], in pinned memory: see `_DraftAndVerify.forward`. The first pass is the target's."""

    plan: Plan
    target: Runner[Any]
    draft: Runner[Any] | None
    found: Tensor
    event: Any
    passes: list[DevicePass]

    def verdict(self, timer: StepTimer) -> Verdict:
        """Wait for the device; every row's accepted tokens, and the extra one, −1 where none could be chosen."""
        with timer("forward", is_overlapped=True):
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
        """Count all that was fed as padding."""
        self._count([None] * len(self.plan.rows))

    def _count(self, lengths: Sequence[int | None]) -> None:
        """Enter the passes in the books of their models, the texts having had these lengths; what was fed of a row without is padding."""
        is_real = np.array([n is not None for n in lengths])
        surplus = np.array([row.longest for row in self.plan.rows]) - np.array([n or 0 for n in lengths])
        for one in self.passes:
            count = one.batch.num_rows
            kv_lens = np.where(is_real[:count], one.batch.kv_lens.numpy() - surplus[:count], 0)
            one.runner.count(
                replace(one.batch, kv_lens=torch.from_numpy(kv_lens)), int(is_real[one.values.columns[0]].sum()), one.bucket.num_tokens
            )


class Ahead:
    """Launches steps of a target, and of the draft model that drafts chains for it. Both capture their passes."""

    def __init__(self, target: Runner[Any], draft: Runner[Any] | None) -> None:
        self._target, self._draft = target, draft
        self._graphs = captured_of(target).graphs
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
        runners = list(dict.fromkeys(one.runner for one in passes))
        is_drawn = any(not row.sequence.params.is_greedy for row in rows)
        shape = Shape(filled_up(len(rows)), own.bucket, tuple(one.bucket for one in drafting), is_drawn)
        for runner in runners:
            runner.cache.apply_copies()
        outputs = self._graphs.run(
            shape,
            lambda: _DraftAndVerify.of(shape, [_Model.of(runner) for runner in runners], self._state),
            lambda program: program.fill(rows, passes),
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

    def _target_pass(self, rows: Sequence[PlannedRow]) -> DevicePass:
        spans = [Span(r.sequence.id, r.longest - 1, [0] * (1 + r.max_draft_tokens), 1 + r.max_draft_tokens, r.longest) for r in rows]
        return _laid_out(self._target, rows, spans)

    def _draft_passes(self, rows: Sequence[PlannedRow]) -> list[DevicePass]:
        """The first reads what is known, each later one what the one before has chosen; the last drafted token is not read."""
        if self._draft is None:
            return []
        found: list[DevicePass] = []
        for depth in range(rows[0].max_draft_tokens):
            members = [row for row in rows if row.max_draft_tokens > depth]
            new = 1 if depth else KNOWN
            one = _laid_out(self._draft, members, [Span(r.sequence.id, r.longest + depth - new, [0] * new, 1, r.longest) for r in members])
            logit_rows = np.zeros(len(rows), np.int64)
            logit_rows[: len(members)] = one.values.logit_rows
            bucket = replace(one.bucket, num_logits=filled_up(len(rows)))
            found.append(replace(one, values=replace(one.values, logit_rows=logit_rows), bucket=bucket))
        if len(found) > 1:
            again = common(one.bucket for one in found[1:])
            found[1:] = [replace(one, bucket=again) for one in found[1:]]
        return found


def _laid_out(runner: Runner[Any], rows: Sequence[PlannedRow], spans: Sequence[Span]) -> DevicePass:
    """A pass over the step's first rows, as if their texts were as long as they may be."""
    batch = runner.pack(spans)
    of_token = np.repeat(np.arange(len(rows)), np.diff(batch.indptr.numpy()))
    longest = np.array([row.longest for row in rows])[of_token]
    slack = longest - np.array([row.shortest for row in rows])[of_token]
    tables = tuple(plan_tables(batch, key, slack.astype(np.int32)) for key in captured_of(runner).keys)
    columns = of_token, batch.positions.numpy() - longest, np.full(batch.num_tokens, -1)
    return DevicePass(runner, batch, PassValues(columns, batch.logit_rows.numpy(), tables), bucket_of(batch, tables))


def captured_of(runner: Runner[Any]) -> Captured:
    """The graphs of a model whose steps run ahead."""
    assert isinstance(runner.captured, Captured)
    return runner.captured


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
        captured = captured_of(runner)
        cache = captured.cache
        return cls(captured.keys, cache.block_size, cache.null_slots, runner.loaded.vocab_size, captured.launch())


@dataclass(frozen=True)
class _DraftAndVerify:
    """Draft, verify, and find where the next step begins. It may run twice: what it has found is put into `state` afterwards.

    The first pass is the target's, with the first of `models` and block tables, all others are the draft model's. The first of the
    columns has NUM_COLUMNS rows; the others say what tokens are drawn by.
    """

    buffers: Buffers
    models: Sequence[_Model]
    state: Tensor
    num_drafted: int

    @classmethod
    def of(cls, shape: Shape, models: Sequence[_Model], state: Tensor) -> Self:
        rows = shape.num_rows
        columns: list[tuple[tuple[int, ...], torch.dtype]] = [((NUM_COLUMNS, rows), torch.int64)]
        columns += [((rows,), dtype) for dtype in (*DRAWN, torch.int64)] if shape.is_drawn else []
        buckets = [[shape.target], [*shape.draft]]
        tables = [(rows, table_width(own, model.block_size)) for own, model in zip(buckets, models, strict=False)]
        buffers = Buffers([shape.target, *shape.draft], (torch.int64,) * 3, columns, tables, state.device)
        return cls(buffers, models, state, len(shape.draft))

    def fill(self, rows: Sequence[PlannedRow], passes: Sequence[DevicePass]) -> None:
        counts = [row.max_draft_tokens for row in rows]
        firsts = passes[0].batch.indptr[:-1].tolist()
        known = [row.sequence.tokens[-KNOWN:] for row in rows]
        of_rows = ([r.pending_row for r in rows], [len(r.sequence) for r in rows], *zip(*known, strict=True), counts, firsts)
        columns: list[NDArray[Any]] = [np.array(of_rows, np.int64)]
        if len(self.buffers.columns) > 1:
            samplers = [row.sequence.sampler for row in rows]
            columns += draw_columns([s.params for s in samplers], [row_key(s.seed, s.index) for s in samplers])
        pads = [(0, -1, self._model(i).null_slots) for i in range(len(passes))]
        tables = [one.batch.block_table.numpy() for one in passes[: len(self.models)]]  # the draft model's first pass has all rows
        self.buffers.fill([one.values for one in passes], pads, columns, tables)

    def forward(self) -> Outputs:
        """int64[B, K + 2]: the target's own tokens and how many drafts equal them; int64[1 + KNOWN, B]: the new state."""
        source, lengths, *known, counts, firsts = self.buffers.columns[0]
        before = torch.where(source >= 0, self.state[:, source.clamp_min(0)], torch.stack([lengths, *known]))
        lengths, *texts = before.unbind()
        keys = self._keys(lengths)
        for i in range(self.num_drafted):
            logits = self._run(1 + i, lengths, texts)
            padded = F.pad(logits, (0, self.models[0].vocab_size - logits.shape[-1]), value=-torch.inf)
            texts.append(self._choose(padded, slice(None), None if keys is None else keys[i]))
        rows, offsets, _ = self.buffers.columns_of(0)
        chosen = self._choose(self._run(0, lengths, texts), rows, None if keys is None else keys[offsets + 1, rows])
        at = torch.arange(self.num_drafted + 1, device=chosen.device)
        own = chosen[(firsts[:, None] + torch.minimum(at, counts[:, None])).clamp_max(len(chosen) - 1)]
        drafted = torch.stack(texts[KNOWN:], 1) if self.num_drafted else own[:, :0]
        is_kept = (drafted == own[:, :-1]) & (drafted >= 0) & (at[:-1] < counts[:, None])
        accepted = is_kept.long().cumprod(1).sum(1, keepdim=True)
        emitted = torch.cat([texts[KNOWN - 1][:, None], own], 1)
        last = emitted.gather(1, torch.cat([accepted, accepted + 1], 1))
        return torch.cat([own, accepted], 1), torch.stack([lengths + accepted[:, 0] + 1, *last.unbind(1)])

    def _run(self, index: int, lengths: Tensor, texts: Sequence[Tensor]) -> Tensor:
        """Logits [R, V] of a pass. `lengths` int64[B]; `texts` int64[B] each: the last known tokens, and those drafted."""
        model, (rows, offsets, null_slots) = self._model(index), self.buffers.columns_of(index)
        table, size, is_real = self.buffers.block_tables[min(index, 1)], model.block_size, null_slots < 0
        positions = torch.where(is_real, lengths[rows] + offsets, 0)
        slots = torch.where(is_real, table[rows, positions // size].long() * size + positions % size, null_slots)
        tokens = torch.stack(list(texts))[offsets + KNOWN, rows]
        tokens = torch.where((tokens >= 0) & (tokens < model.vocab_size), tokens, 0)  # none was chosen, or it is none of this model
        inputs = self.buffers.inputs(index, model.keys, table, positions.int(), positions.int(), slots)
        return model.launch(inputs, tokens.int())[0]

    def _model(self, index: int) -> _Model:
        return self.models[min(index, 1)]

    def _keys(self, lengths: Tensor) -> Tensor | None:
        """int64[K + 1, B]: of the noise that the tokens after the known ones are drawn with."""
        if len(self.buffers.columns) == 1:
            return None
        offsets = torch.arange(self.num_drafted + 1, device=lengths.device)
        return noise_keys(self.buffers.columns[-1], lengths + offsets[:, None])

    def _choose(self, logits: Tensor, rows: Tensor | slice, keys: Tensor | None) -> Tensor:
        """int64[R]: a token for each row of logits [R, V], which belongs to one of `rows`; −1 where there is none."""
        if keys is None:
            best = logits.argmax(-1)  # NaN is taken for the largest
            return torch.where(logits.gather(1, best[:, None])[:, 0].isfinite(), best, -1)
        temperature, top_k, top_p, log_min_p, _ = (column[rows] for column in self.buffers.columns[1:])
        return draw_rows(logits.float(), temperature, top_k, top_p, log_min_p, keys)
