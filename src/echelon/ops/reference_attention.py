"""The definition of ragged attention, in plain PyTorch: matmuls of fixed shape over items of queries and tiles of keys (`reference`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.ops.slots import gather_slots

QUERY_TILE = 16  # (token, head of the group) pairs of one attention item
KEY_TILE = 128  # keys of one attention tile; tiles lie at multiples of this from position 0
MAX_ITEMS = 64  # attention items worked on at once, so that what they need stays in the cache


@dataclass(frozen=True)
class KeyTile:
    """One tile of keys, the U rows that have them and the P items that see some of them.

    slots   int64[U, K]         KV slots of each row's keys (0 where the row has none)
    exists  bool[U, 1, K, 1]    the key has been written
    items   int64[P]            which items
    row     int64[P] or None    place of each item's row among the U; None where every row has one item
    visible bool[P, 1, Q, K]    the query may see the key
    """

    slots: Tensor
    exists: Tensor
    items: Tensor
    row: Tensor | None
    visible: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """The work of one attention call: items of QUERY_TILE (token, head of the group) pairs of one row.

    gather  int64[I, Q]  pair (token · G + head) in place Q of item I; 0 where the item is not full
    scatter int64[T · G] place (item · Q + q) of each pair
    """

    num_items: int
    gather: Tensor
    scatter: Tensor
    tiles: list[KeyTile]


def without_trees(batch: RaggedBatch) -> RaggedBatch:
    """The same tokens as chains: every drafted token a row of its own, whose table leads to the slots of its ancestors.

    A key so takes the place in its tile that its position has, whatever slot it lies in.
    """
    if batch.parents is None:
        return batch
    places = torch.arange(int(batch.kv_lens.max()))
    table = batch.block_table.long()
    own = table[:, (places // batch.block_size).clamp_max(table.shape[1] - 1)] * batch.block_size + places % batch.block_size
    ends, lines = [0], []
    for row, ((start, end), parents) in enumerate(zip(pairwise(batch.indptr.tolist()), batch.row_parents(), strict=True)):
        first_drafted, text_len = max(start, end - len(parents)), int(batch.text_lens[row])
        if first_drafted > start:
            ends.append(first_drafted)
            lines.append(own[row])
        for token in range(first_drafted, end):
            line, node, position = own[row].clone(), token - end + len(parents), int(batch.positions[token])
            while node >= 0:
                line[position] = own[row, text_len + node]
                node, position = parents[node], position - 1
            ends.append(token + 1)
            lines.append(line)
    indptr = torch.tensor(ends, dtype=torch.int32)
    return replace(
        batch,
        indptr=indptr,
        kv_lens=batch.positions[indptr[1:].long() - 1] + 1,
        block_table=torch.stack(lines),
        block_size=1,
        parents=None,
        node_indptr=None,
    )


def plan_attention(batch: RaggedBatch, group: int, window: int | None) -> AttentionPlan:
    """What all layers with the same group size and sliding window share."""
    batch = without_trees(batch)
    counts = batch.indptr.diff().long()
    pairs = counts * group
    items_per_row = (pairs + QUERY_TILE - 1) // QUERY_TILE
    item_row = torch.repeat_interleave(torch.arange(batch.num_rows), items_per_row)
    first_item = items_per_row.cumsum(0) - items_per_row
    pair_row = torch.repeat_interleave(torch.arange(batch.num_rows), pairs)
    pair_in_row = torch.arange(len(pair_row)) - (batch.indptr[:-1].long() * group)[pair_row]
    scatter = first_item[pair_row] * QUERY_TILE + pair_in_row
    gather = torch.zeros(len(item_row) * QUERY_TILE, dtype=torch.int64)
    gather[scatter] = torch.arange(len(pair_row))
    positions = torch.full((len(item_row) * QUERY_TILE,), -1, dtype=torch.int64)  # −1: sees nothing
    positions[scatter] = batch.positions.long()[torch.arange(len(pair_row)) // group]
    positions = positions.view(-1, QUERY_TILE)
    tiles = _key_tiles(batch, item_row, positions, window)
    return AttentionPlan(len(item_row), gather.view(-1, QUERY_TILE), scatter, tiles)


def _key_tiles(batch: RaggedBatch, item_row: Tensor, positions: Tensor, window: int | None) -> list[KeyTile]:
    """Tiles in order of position, each cut into pieces of at most MAX_ITEMS items."""
    last = positions.amax(1)
    first = torch.zeros_like(last)
    if window is not None:
        lowest = positions.masked_fill(positions < 0, torch.iinfo(torch.int64).max).amin(1)
        first = (lowest - window + 1).clamp_min(0)
    return [
        _key_tile(batch, start, items, item_row[items], positions[items], window)
        for start in range(0, int(batch.kv_lens.max()), KEY_TILE)
        for items in torch.split(torch.nonzero((last >= start) & (first < start + KEY_TILE)).flatten(), MAX_ITEMS)
    ]


def _key_tile(batch: RaggedBatch, start: int, items: Tensor, item_row: Tensor, positions: Tensor, window: int | None) -> KeyTile:
    """The tile of positions `start … start + KEY_TILE − 1` for some items; positions int64[P, Q] of their queries."""
    keys = torch.arange(start, start + KEY_TILE)
    rows, row = torch.unique(item_row, return_inverse=True)
    exists = keys < batch.kv_lens.long()[rows, None]
    table = batch.block_table.long()
    blocks = (keys // batch.block_size).clamp_max(table.shape[1] - 1)
    slots = table[rows][:, blocks] * batch.block_size + keys % batch.block_size
    visible = keys <= positions[..., None]
    if window is not None:
        visible &= keys > positions[..., None] - window
    one_each = None if len(rows) == len(items) else row
    return KeyTile(slots.masked_fill(~exists, 0), exists[:, None, :, None], items, one_each, visible[:, None])


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every new token over its row's keys and values, which have been written already.

    query [T, H, D], keys [blocks, H / G, block_size, D], values [blocks, H / G, block_size, Dv], sinks [H] or None → [T, H, Dv] in the
    query's dtype.
    Scores and sums are float32. Softmax runs online over key tiles in order of position; a tile that a query cannot see leaves its
    running maximum, sum and output unchanged, bit for bit.
    """
    num_tokens, num_heads, size = query.shape
    num_kv_heads, value_size = values.shape[1], values.shape[3]
    group = num_heads // num_kv_heads
    key = (group, window)
    plan: AttentionPlan = batch.plans.get(key) or batch.plans.setdefault(key, plan_attention(batch, group, window))

    # [T, H, D] → [pairs, Hkv, D] → [items, Hkv, Q, D]
    pairs = query.view(num_tokens, num_kv_heads, group, size).transpose(1, 2).reshape(-1, num_kv_heads, size)
    tiled = (pairs.float() * scale)[plan.gather].transpose(1, 2).contiguous()
    shape = (plan.num_items, num_kv_heads, QUERY_TILE)
    highest = torch.full((*shape, 1), -torch.inf)
    # column `value_size` of the accumulator is the softmax denominator, summed by the same matmul as the values; full columns of 16
    # keep framework matmuls away from edge code whose result depends on a row's place
    width = -(-(value_size + 1) // 16) * 16
    total = torch.zeros(*shape, width)
    for tile in plan.tiles:
        _attend_tile(tile, tiled, keys, values, softcap, highest, total)
    denominator = total[..., value_size : value_size + 1]
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, group)[:, plan.gather % group].transpose(0, 1)
        denominator = denominator + torch.exp(sink[..., None] - highest)
    out = (total[..., :value_size] / denominator).transpose(1, 2).reshape(-1, num_kv_heads, value_size)[plan.scatter]
    out = out.view(num_tokens, group, num_kv_heads, value_size).transpose(1, 2)
    return out.reshape(num_tokens, num_heads, value_size).to(query.dtype)


def _attend_tile(tile: KeyTile, query: Tensor, keys: Tensor, values: Tensor, softcap: float | None, highest: Tensor, total: Tensor) -> None:
    """Fold one tile of keys into the running maximum and sums of its items (in place)."""
    num_items, heads, width = len(tile.items), query.shape[1], total.shape[-1]
    row_keys = gather_slots(keys, tile.slots).transpose(1, 2).contiguous().float()  # [U, Hkv, K, D]
    row_values = torch.ones(*row_keys.shape[:3], width)
    row_values[..., : values.shape[-1]] = torch.where(tile.exists, gather_slots(values, tile.slots).transpose(1, 2), 0.0)
    is_broken = ~row_values.isfinite().all(-1)  # 0 · NaN is NaN: a query is hurt by what it sees alone
    row_values[is_broken] = 0.0
    if tile.row is not None:
        row_keys, row_values, is_broken = row_keys[tile.row], row_values[tile.row], is_broken[tile.row]
    scores = torch.bmm(query[tile.items].flatten(0, 1), row_keys.flatten(0, 1).transpose(1, 2))
    scores = scores.view(num_items, heads, QUERY_TILE, KEY_TILE)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill_(~tile.visible, -torch.inf)
    old = highest[tile.items]
    new = torch.maximum(old, scores.amax(-1, keepdim=True))
    anchor = new.masked_fill(new == -torch.inf, 0.0)  # a query that has seen nothing yet
    weights = scores.sub_(anchor).exp_()
    summed = torch.bmm(weights.flatten(0, 1), row_values.flatten(0, 1)).view(num_items, heads, QUERY_TILE, width)
    if is_broken.any():
        summed.masked_fill_((tile.visible & is_broken[:, :, None]).any(-1, keepdim=True), torch.nan)
    total[tile.items] = total[tile.items] * torch.exp(old - anchor) + summed
    highest[tile.items] = new
