"""A head drafts from the target's hidden states: Medusa, Clover, EAGLE and their kin, one network pass a level of the tree.

The hidden state of position t and the token after it make the head's state t. After a step, `observe` notes the target's states of all
tokens that were kept, so the head's keys and values are always made from true features; what it drafts from its own goes into places after
them, and is overwritten. A row has been read up to where the target has: the prompt, its pieces, a row that accepted anything, and one that
comes back after preemption are one case. Where early features were lost, the row is drafted for again once the target reads it anew.
Reading waits until the row is to be drafted for: features of a row that is not are kept, a few hundred tokens of them at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.batch import RaggedBatch, Span
from echelon.draft import Draft, Int64, RowVerdict, Verdict, indptr_of
from echelon.drafters.base import Drafter, Pace, every
from echelon.drafters.frontier import Frontier, grow
from echelon.errors import ConfigError
from echelon.heads.base import Head
from echelon.heads.checkpoints import load_head
from echelon.kv.cache import KVCache, LayerShape
from echelon.model import pack as unpadded
from echelon.model.attention import CONTEXT_KEYWORD, CachedAttention, RecordingAttention
from echelon.model.hidden_states import HiddenStateReader
from echelon.model.load.loading import LoadedModel, serve_head
from echelon.ops.sample import likeliest
from echelon.sampling import Sampler, SamplingParams
from echelon.sequence import PlannedRow, Sequence
from echelon.speculative_config import SpeculativeConfig
from echelon.stats import Occupancy, Usage
from echelon.trees import Forest, Growth

MOST_UNREAD = 256  # tokens of a row before which they are read, whether it drafts or not
MOST_AT_ONCE = 2048  # of several rows that are read in one pass


@dataclass(frozen=True)
class AttachedHead:
    """A head on its target.

    shapes   what its attention layers store per token; with none it needs no cache
    extends  they are called for drafted nodes too
    """

    head: Head
    reader: HiddenStateReader
    shapes: list[LayerShape]
    extends: bool

    @property
    def num_features(self) -> int:
        """Numbers of the target's hidden states that a state in the head's cache is made of; 0 where it has none."""
        return int(self.reader.example().shape[-1]) if self.shapes else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the head's keys and values of one token."""
        return sum(s.bytes_per_token(self.head.dtype) for s in self.shapes)


def head_for(config: SpeculativeConfig | None, target: LoadedModel, given: Head | None) -> Head | None:
    """What `config` asks for: the head in its folder, unless one is `given`; None where it asks for no head.

    Raises
    ------
    ConfigError     there is none, or it is of another method
    ModelLoadError  it cannot be read, or was made for another target
    """
    if config is None or not config.is_head:
        return None
    if given is not None and config.quantization is not None:
        raise ConfigError(
            f"quantization = {config.quantization!r} rounds a head that is loaded here, and draft_head is given as it is; leave it out"
        )
    head = given
    if head is None:
        head = load_head(config.named_model(), target.model)
        head.keep(config.longest_path)
        serve_head(head, target.is_fast, config.quantization)
    if head.method != config.method:
        raise ConfigError(f"the head is one of method {head.method!r}, not {config.method!r}; change the key 'method'")
    return head


@torch.inference_mode()
def attach_head(head: Head, target: LoadedModel) -> AttachedHead:
    """Find its hidden states in the target, and what the head's attention layers store, from a call with one token each.

    Raises
    ------
    UnsupportedModelError  the target lacks a hidden state that the head reads
    ConfigError            the head does not fit the target
    """
    reader, zero = HiddenStateReader(target.model, head.hidden_state_names), torch.zeros(1, dtype=torch.int64, device=target.device)
    encoding, extending = RecordingAttention(), RecordingAttention()
    try:
        states = head.encode(reader.example().to(head.dtype), zero, zero, **{CONTEXT_KEYWORD: encoding})
        states = head.extend(states, zero, zero + 1, 1, **{CONTEXT_KEYWORD: extending})
        width = head.logits(states, 0).shape[-1]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConfigError(f"the head of method {head.method!r} does not fit {target.name!r}: {error}") from error
    if width != target.vocab_size:
        raise ConfigError(
            f"the head of method {head.method!r} has {width:,} logits, the target {target.vocab_size:,}; it was made for another"
        )
    shapes = encoding.shapes | extending.shapes
    return AttachedHead(head, reader, [shapes[i] for i in sorted(shapes)], bool(extending.shapes))


@dataclass
class _Unread:
    """Tokens of a row that the head has not read: from `start` on the token after each place, and the target's features, pieces [n, F]."""

    start: int
    tokens: list[int]
    features: list[Tensor]
    has_failed: bool = False  # has a pass that was to read it?

    @property
    def end(self) -> int:
        """Where the next ones belong."""
        return self.start + len(self.tokens)


class HeadDrafter(Drafter):
    """`head` proposes trees that `growth` shapes. `cache` is the head's own where it has attention layers; its tables are among the
    scheduler's, with as many slots reserved as in the target's. `usage` counts its passes: those that read what was kept, with which the
    first level of the tree comes, and one for every deeper level. No path has a joint log-probability below `min_score`.

    drafts_first  whether the first token of a text may be drafted. Then the head has read the prompt, which it has not where the prompt is
                  read in one piece: where what is drafted can change a text, this must not depend on the pieces
    """

    usage: Usage

    def __init__(
        self, attached: AttachedHead, growth: Growth, cache: KVCache | None, min_score: float = -np.inf, drafts_first: bool = True
    ) -> None:
        assert bool(attached.shapes) == (cache is not None)
        self.hidden_state_names, self.cache, self.growth = attached.reader.names, cache, growth
        self.head, self.extends = attached.head, attached.extends
        self._dtype, self._min_score, self._drafts_first, self.usage = self.head.dtype, min_score, drafts_first, Usage()
        self._example = attached.reader.example()
        self._states: dict[int, tuple[int, Tensor]] = {}  # row → tokens that its last state knows, and the state [s]
        self._unread: dict[int, _Unread] = {}  # row → what was kept of it and is not read yet
        self.pace: Pace = every

    @property
    def breadth(self) -> int:
        return self.growth.breadth

    @torch.inference_mode()
    def rehearse(self, num_rows: int) -> None:
        """Read a level of each row, and rank the next."""
        tables, breadth = self.cache.tables if self.cache is not None else None, self.breadth
        width = breadth if self.extends else 1
        for row in range(num_rows):
            if tables is not None:
                tables.reserve(row, width)
        spans = [Span(row, 0, [0] * width, 0, width) for row in range(num_rows)]
        states = self._encode(spans, self._example.expand(num_rows * width, -1).to(self._dtype)).repeat_interleave(breadth, 0)
        samplers = [Sampler(SamplingParams(temperature=0.0), 0)] * len(states)
        likeliest(self.head.logits(states, 0), samplers, [1] * len(states), self.growth.width)
        for row in range(num_rows):
            if tables is not None:
                tables.release(row)

    @torch.inference_mode()
    def propose(self, rows: SequenceOf[PlannedRow]) -> Draft:
        self._read([row.sequence.id for row in rows if row.max_draft_tokens > 0])
        active = [i for i, row in enumerate(rows) if self._may_draft(row)]
        if not active:
            return Draft.none(len(rows))
        depths = [min(row.max_draft_depth, self.growth.depth) for row in rows]
        forest = Forest([row.max_draft_tokens for row in rows], depths, self._min_score)
        states = torch.stack([self._states[rows[i].sequence.id][1] for i in active])
        return grow(self.growth, _HeadFrontier(self, forest, rows, forest.plant(active), states), self.pace)

    def _may_draft(self, row: PlannedRow) -> bool:
        """Its state is that of the text as it is, and the target has the text read."""
        if not (self._drafts_first or row.sequence.num_output_tokens):
            return False
        known, _ = self._states.get(row.sequence.id, (-1, None))
        return known == len(row.sequence) == row.start + 1 and min(row.max_draft_tokens, row.max_draft_depth) > 0

    @torch.inference_mode()
    def observe(self, rows: SequenceOf[PlannedRow], verdict: Verdict, hidden_states: Tensor | None) -> None:
        """Note what was kept; `hidden_states` [T, F] of all tokens of the step. Prompts are read at once, as the target reads them."""
        assert hidden_states is not None, "the target was not asked for hidden states"
        following = [_following(row, kept) for row, kept in zip(rows, verdict, strict=True)]
        prompts, waiting = list[int](), list[int]()
        features = self._features(rows, verdict, following, hidden_states)
        is_shared = sum(map(len, features)) == len(rows)  # one token each; else what waits keeps nothing of other rows in memory
        for row, tokens, own_features in zip(rows, following, features, strict=True):
            number, is_prompt = row.sequence.id, _is_of_a_prompt(row)
            if not self._note(row, tokens, own_features if is_shared or is_prompt else own_features.clone()):
                self._drop(number)
            elif is_prompt:
                prompts.append(number)
            else:
                waiting.append(number)
        self._read(prompts + self._due(waiting))
        tables = self.cache.tables if self.cache is not None else None
        for number in [row.sequence.id for row in rows]:
            if tables is not None and number in tables:  # what was drafted goes; what waits has its room
                unread = self._unread.get(number)
                tables.commit(number, tables.num_cached(number), 0 if unread is None else unread.end)

    def _due(self, waiting: SequenceOf[int]) -> list[int]:
        """Those of these rows that are read though they do not draft: the fullest, one in most steps, since none may take long; and so soon
        that none waits with MOST_UNREAD tokens before its turn, one a step, comes.
        """
        at_once = max(1, -(-len(waiting) // (MOST_UNREAD // 2)))
        least = MOST_UNREAD - len(waiting) // at_once
        counts = {number: len(self._unread[number].tokens) for number in waiting}
        return sorted((n for n in waiting if counts[n] >= least), key=lambda n: -counts[n])[:at_once]

    def _features(
        self, rows: SequenceOf[PlannedRow], verdict: Verdict, following: SequenceOf[list[int]], hidden_states: Tensor
    ) -> SequenceOf[Tensor]:
        """Of each row the hidden states [n, F] before the tokens that follow; without a cache only the last is ever used."""
        if len(hidden_states) == len(rows) > 0:  # one token each
            return torch.split(hidden_states.to(self._dtype, copy=True), 1)
        indptr = indptr_of([row.num_new + kept.num_draft_tokens for row, kept in zip(rows, verdict, strict=True)])
        places: list[int] = []
        lengths = []
        for row, kept, tokens, first in zip(rows, verdict, following, indptr.tolist(), strict=False):
            own = [*range(first, first + row.num_new), *(first + row.num_new + node for node in kept.path)]
            places += (used := own[len(own) - len(tokens) :] if self.cache is not None else own[len(tokens) - 1 : len(tokens)])
            lengths.append(len(used))
        found: SequenceOf[Tensor] = torch.split(hidden_states[torch.tensor(places, dtype=torch.int64)].to(self._dtype), lengths)
        return found

    def _note(self, row: PlannedRow, following: list[int], features: Tensor) -> bool:
        """Keep the features [n, F] of what was fed, and the token after each, until they are read; false where they are of no use."""
        sequence, end = row.sequence, row.start + len(following)
        if following[-1] < 0:  # the row fails
            return False
        if self.cache is None:
            self._unread[sequence.id] = _Unread(end - 1, following[-1:], [features])
            return row.is_sampled
        unread = self._unread.get(sequence.id)
        cached = self.cache.tables.num_cached(sequence.id)
        if unread is None or unread.start != cached:
            unread = self._begun(self.cache, sequence, cached, row.start)
        if unread.end != row.start:
            return False
        unread.tokens += following
        unread.features.append(features)
        self._unread[sequence.id] = unread
        return True

    def _begun(self, cache: KVCache, sequence: Sequence, cached: int, start: int) -> _Unread:
        """Nothing to be read from place `cached` on; or, where a row that has entered with keys and values of another text lacks its last
        state, that one: its features have been kept.
        """
        if not (cached == start - 1 and cache.tables.resumes(sequence.id)):
            return _Unread(cached, [], [])
        cache.apply_copies()
        block = cache.tables.blocks(sequence.id)[cached // cache.block_size]
        return _Unread(cached, [sequence.tokens[start]], [cache.boundaries[block][None]])

    @torch.inference_mode()
    def conclude(self, rows: SequenceOf[Sequence]) -> None:
        if self.cache is None:
            return
        tables, due = self.cache.tables, []
        for sequence in rows:
            unread = self._unread.get(sequence.id)
            if unread is None or min(unread.end, len(sequence) - 1) // tables.block_size == unread.start // tables.block_size:
                continue  # no block would become whole
            if tables.reserve(sequence.id, unread.end):
                due.append(sequence.id)
        self._read(due)

    def _read(self, numbers: SequenceOf[int]) -> None:
        """Read what these rows have waiting, in passes of MOST_AT_ONCE tokens or one row."""
        waiting = {number: unread for number in numbers if (unread := self._unread.get(number)) is not None}
        found = waiting
        if self.cache is not None:  # a text that is read anew has left what was kept of it behind
            found = {n: u for n, u in waiting.items() if n in self.cache.tables and self.cache.tables.num_cached(n) == u.start}
        for number in waiting.keys() - found.keys():
            del self._unread[number]
        for group in _groups(found):
            spans = [Span(number, found[number].start, found[number].tokens, 0, found[number].end) for number in group]
            again = [number for number in group if found[number].has_failed]
            for number in group:
                found[number].has_failed = True  # unless it comes to its end
            for number in again:
                del self._unread[number]  # a second failure is not followed by a third
            features = torch.cat([features for number in group for features in found[number].features])
            for span, state in zip(spans, self._encode(spans, features), strict=True):
                self._states[span.row] = (span.text_len + 1, state)
                self._unread.pop(span.row, None)  # not before: a pass that fails leaves its rows what they have to read

    def _drop(self, row: int) -> None:
        """Give up the row until the target reads it anew."""
        self._states.pop(row, None)
        self._unread.pop(row, None)

    def _encode(self, spans: list[Span], features: Tensor) -> Tensor:
        """States [B, s] of the last position of every span."""
        lengths, device = torch.tensor([len(s.tokens) for s in spans]), features.device
        tokens = torch.tensor([t for s in spans for t in s.tokens]).to(device)
        if self.cache is None:
            positions = torch.tensor([s.start for s in spans]).to(device)
            self.count(len(spans))
            return self.head.encode(features, tokens, positions)
        batch, context = self.context(spans)
        states = self.head.encode(features, tokens, batch.positions.long().to(device), **context)
        self.cache.keep_boundaries(batch.slots, features)
        for span in spans:
            self.cache.tables.advance(span.row, span.text_len)
        return states[lengths.cumsum(0) - 1]

    def context(self, spans: SequenceOf[Span]) -> tuple[RaggedBatch, dict[str, Any]]:
        """The batch of `spans`, and the keywords that the head's attention layers are called with."""
        assert self.cache is not None
        self.cache.apply_copies()
        batch = unpadded.pack(spans, self.cache.tables)
        self.count(batch.num_tokens, batch)
        return batch, {CONTEXT_KEYWORD: CachedAttention(batch, self.cache)}

    def count(self, num_tokens: int, batch: RaggedBatch | None = None) -> None:
        """One pass over so many tokens; without a `batch` it reads no cache."""
        if self.cache is None or batch is None:
            self.usage.count(num_tokens, Occupancy(num_tokens, 0, 0, 0, 0), 0)
        else:
            self.usage.count(num_tokens, unpadded.occupancy(batch, self.cache), self.cache.bytes_per_slot)

    def forget(self, row: int) -> None:
        """The scheduler has released the row's blocks already, or the row is read anew."""
        self._drop(row)
        if self.cache is not None and row in self.cache.tables:
            tables = self.cache.tables
            tables.commit(row, 0, 0 if tables.num_cached(row) else tables.max_tokens_per_row)  # a row may enter in this very step


def _groups(waiting: Mapping[int, _Unread]) -> Iterator[list[int]]:
    """Rows that are read in one pass."""
    group, count = list[int](), 0
    for number, unread in waiting.items():
        if group and count + len(unread.tokens) > MOST_AT_ONCE:
            yield group
            group, count = [], 0
        group.append(number)
        count += len(unread.tokens)
    if group:
        yield group


def _is_of_a_prompt(row: PlannedRow) -> bool:
    """Whether a step reads a piece of a prompt, of one token perhaps: further samples start from what the head has read of it."""
    return row.num_new > 1 or not row.is_sampled


def _following(row: PlannedRow, kept: RowVerdict) -> list[int]:
    """The token after each that was fed and kept, as far as they are known."""
    after = row.sequence.tokens[row.start + 1 : row.start + 1 + row.num_new]
    return [*after, *kept.accepted, kept.next_token][: row.num_new + len(kept.accepted)] if row.is_sampled else after


class _HeadFrontier(Frontier):
    """Nodes share a state where the head does not read what it has drafted (Medusa); its logits are computed once."""

    def __init__(self, drafter: HeadDrafter, forest: Forest, rows: SequenceOf[PlannedRow], roots: Int64, states: Tensor) -> None:
        super().__init__(forest, rows, roots)
        self._drafter, self._states = drafter, states  # [S, s]

    def logits(self, depth: int) -> Tensor:
        return self._drafter.head.logits(self._states, depth)

    def advance(self, nodes: Int64, at: Int64, depth: int) -> Int64:
        states = self._states[torch.from_numpy(at)]
        tokens = torch.from_numpy(self.forest.tokens[nodes]).to(states.device)
        known = self.text_lens - 1  # the head's places: each knows the token that follows it
        positions = torch.from_numpy(known[self.forest.rows[nodes]] - 1 + self.forest.depths[nodes]).to(states.device)
        context = self._drafter.context(self.spans(nodes, known))[1] if self._drafter.extends else {}
        extended = self._drafter.head.extend(states, tokens, positions, depth, **context)
        places: Int64 = np.arange(len(nodes))
        if extended is states:
            used, places = np.unique(at, return_inverse=True)
            self._states = self._states[torch.from_numpy(used)]
        else:
            self._states = extended
        if not self._drafter.extends:
            self._drafter.count(len(self._states))
        return places
