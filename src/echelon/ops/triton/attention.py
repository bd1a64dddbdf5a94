"""Ragged attention: programs of (tokens of a row with their heads of a group, key/value head, keys), as `plan` lays them out.

A program holds `lanes` (token, head) pairs and loads every key and value of its tiles once for all of them. How many follows from the
dtype and the heads of a group, not from the number of tokens: another shape could be another instruction with another order of additions.
Eight tokens have room, where a group has no more heads than that and the dtype is a half. Every lane, used or not, takes registers and
arithmetic: with 64 a program spends longer on a tile than memory takes to bring it, so there are no more than needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.ops.triton.launch import EXACT, dot, narrow, power_of_two
from echelon.ops.triton.plan import FAR, FIELDS, FRESH, KEY_TILE, RESUMED, SPLIT, DevicePlan, PlanKey, plan_attention


def lanes_of(dtype: torch.dtype, group: int) -> int:
    """16, 32 or 64. Matrix instructions have no float32; its products take registers, so its programs are small."""
    return 16 if dtype == torch.float32 else min(64, max(16, 8 * int(triton.next_power_of_2(group))))


@triton.jit
def _merge(highest, total, acc, more_highest, more_total, more_acc):
    """The states of two runs of keys, the earlier first: running maximum and denominator [Q], weighted values [Q, Dv].

    Merged into a state that has seen nothing, a state stays as it is; merging a state that has seen nothing changes nothing.
    """
    new = tl.maximum(highest, more_highest)
    anchor = tl.where(new == float("-inf"), 0.0, new)
    keep = tl.exp(highest - anchor)
    take = tl.exp(more_highest - anchor)
    return new, total * keep + more_total * take, acc * keep[:, None] + more_acc * take[:, None]


@triton.jit
def _output(highest, total, acc, sinks, head, is_real, has_sinks: tl.constexpr):
    if has_sinks:
        total += tl.exp(tl.load(sinks + head, is_real, other=0.0).to(tl.float32) - highest)
    return acc / tl.where(is_real, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["table_row", "path_row"])  # they differ from batch to batch
def _attend(
    query, keys, values, sinks, out, states, sums, items, table, paths, positions, bases,
    query_token, query_head, key_block, key_head, key_slot, value_block, value_head, value_slot, table_row, path_row,
    num_heads, scale, softcap, window,
    is_late: tl.constexpr, block_size: tl.constexpr, group: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, value_size: tl.constexpr,
    padded: tl.constexpr, value_padded: tl.constexpr, lanes: tl.constexpr, tile: tl.constexpr, split: tl.constexpr, fields: tl.constexpr,
    fresh: tl.constexpr, resumed: tl.constexpr, has_softcap: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """One item and key/value head; strides in values. `heads`: query heads of the group that one program holds; `is_late`: items may have
    paths and take up states.
    """
    item = items + tl.program_id(0) * fields
    row, first_token, end_token = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if first_token >= end_token:  # room left over in the table
        return
    first_key, end_key = tl.load(item + 3), tl.load(item + 4)
    path, path_from, mode = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    chunks: tl.constexpr = (group + heads - 1) // heads
    kv_head = tl.program_id(1) // chunks
    lane = tl.arange(0, lanes)
    token = (first_token + lane // heads).to(tl.int64)
    in_group = tl.program_id(1) % chunks * heads + lane % heads
    is_real = (token < end_token) & (in_group < group)
    head = kv_head * group + in_group
    position = tl.load(positions + token, is_real, other=-1)
    end_key = tl.minimum(end_key, tl.max(position) + 1)  # what lies beyond may be anything
    column, value_column = tl.arange(0, padded), tl.arange(0, value_padded)
    in_value = is_real[:, None] & (value_column < value_size)[None, :]
    at_query = token[:, None] * query_token + head[:, None] * query_head + column[None, :]
    q = tl.load(query + at_query, is_real[:, None] & (column < size)[None, :], other=0.0)

    highest = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], tl.float32)
    acc = tl.zeros([lanes, value_padded], tl.float32)
    for split_start in range(first_key // split * split, end_key, split):
        is_own = is_real & (position >= split_start) & (position - window < split_start + split - 1)
        state = (tl.load(bases + token, is_own, other=0) + split_start // split).to(tl.int64) * num_heads + head
        at_state = state[:, None] * value_size + value_column[None, :]
        if is_late:
            is_begun = is_own & (mode == resumed)
            m = tl.load(sums + state * 2, is_begun, other=float("-inf"))
            s = tl.load(sums + state * 2 + 1, is_begun, other=0.0)
            a = tl.load(states + at_state, in_value & is_begun[:, None], other=0.0)
        else:
            m = tl.full([lanes], float("-inf"), tl.float32)
            s = tl.zeros([lanes], tl.float32)
            a = tl.zeros([lanes, value_padded], tl.float32)
        for start in range(tl.maximum(first_key, split_start), tl.minimum(end_key, split_start + split), tile):
            key = start + tl.arange(0, tile)
            exists = key < end_key
            place = key
            if is_late:
                on_path = exists & (key >= path_from)
                place = tl.where(on_path, tl.load(paths + path * path_row + (key - path_from), on_path, other=0), key)
            block = tl.load(table + row.to(tl.int64) * table_row + place // block_size, exists, other=0).to(tl.int64)
            at_key = block * key_block + kv_head * key_head + place % block_size * key_slot
            k = tl.load(keys + at_key[None, :] + column[:, None], exists[None, :] & (column < size)[:, None], other=0.0)
            scores = dot(q, k, tl.zeros([lanes, tile], tl.float32)) * scale
            if has_softcap:
                rest = tl.exp(tl.abs(scores) * (-2.0 / softcap))  # tanh |x| = (1 − exp(−2|x|)) / (1 + exp(−2|x|))
                scores = tl.where(scores < 0.0, -softcap, softcap) * ((1.0 - rest) / (1.0 + rest))
            is_visible = exists[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
            scores = tl.where(is_visible, scores, float("-inf"))
            new = tl.maximum(m, tl.max(scores, 1))
            anchor = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp(scores - anchor[:, None])
            keep = tl.exp(m - anchor)
            at_value = block * value_block + kv_head * value_head + place % block_size * value_slot
            v = tl.load(
                values + at_value[:, None] + value_column[None, :], exists[:, None] & (value_column < value_size)[None, :], other=0.0
            )
            s = s * keep + tl.sum(weights, 1)
            a = dot(narrow(weights, v.dtype), v, a * keep[:, None])
            m = new
        highest, total, acc = _merge(highest, total, acc, m, s, a)
        if mode >= fresh:
            tl.store(sums + state * 2, highest, is_own)
            tl.store(sums + state * 2 + 1, total, is_own)
            tl.store(states + at_state, acc, in_value & is_own[:, None])
    if mode < fresh:
        result = _output(highest, total, acc, sinks, head, is_real, has_sinks)
        at_out = (token * num_heads + head)[:, None] * value_size + value_column[None, :]
        tl.store(out + at_out, narrow(result, out.dtype.element_ty), in_value)


@triton.jit
def _merge_splits(
    sinks, out, states, sums, merges, bases, positions, num_heads, window,
    value_size: tl.constexpr, value_padded: tl.constexpr, heads: tl.constexpr, split: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """All splits that one token sees, in order of position, for some of its heads."""
    merge = merges + tl.program_id(0) * 3
    token, first, end = tl.load(merge).to(tl.int64), tl.load(merge + 1), tl.load(merge + 2)
    if first >= end:  # room left over in the table
        return
    base, position = tl.load(bases + token), tl.load(positions + token)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    is_real = head < num_heads
    column = tl.arange(0, value_padded)
    in_value = is_real[:, None] & (column < value_size)[None, :]
    highest = tl.full([heads], float("-inf"), tl.float32)
    total = tl.zeros([heads], tl.float32)
    acc = tl.zeros([heads, value_padded], tl.float32)
    for place in tl.range(tl.maximum(first, (position - window + 1) // split), tl.minimum(end, position // split + 1), num_stages=4):
        state = (base + place).to(tl.int64) * num_heads + head
        m = tl.load(sums + state * 2, is_real, other=float("-inf"))
        s = tl.load(sums + state * 2 + 1, is_real, other=0.0)
        a = tl.load(states + state[:, None] * value_size + column[None, :], in_value, other=0.0)
        highest, total, acc = _merge(highest, total, acc, m, s, a)
    result = _output(highest, total, acc, sinks, head, is_real, has_sinks)
    at_out = (token * num_heads + head)[:, None] * value_size + column[None, :]
    tl.store(out + at_out, narrow(result, out.dtype.element_ty), in_value)


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
    """`contract.Backend.ragged_attention` on a device, where query, keys, values and sinks are; the batch may stay on the host."""
    key = plan_key(query, keys.shape[1], window)
    plan: DevicePlan = batch.plans.get(key) or batch.plans.setdefault(key, plan_attention(batch, key, keys.device))
    return planned_attention(query, keys, values, plan, batch.block_size, scale, window, softcap, sinks)


def plan_key(query: Tensor, num_kv_heads: int, window: int | None) -> PlanKey:
    """What the plan for query [T, H, D] depends on besides the batch."""
    group = query.shape[1] // num_kv_heads
    lanes = lanes_of(query.dtype, group)
    return PlanKey(lanes // min(group, lanes), window)


def planned_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: DevicePlan,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`ragged_attention` by a plan. Nothing here depends on what the plan's tables hold, only on their shapes."""
    query = query if query.stride(2) == 1 else query.contiguous()
    num_heads = query.shape[1]
    make = query.new_zeros if plan.has_pads else query.new_empty
    out = make((len(query), num_heads, values.shape[3]))
    states = torch.empty(plan.num_states, num_heads, values.shape[3], dtype=torch.float32, device=out.device)
    sums = torch.empty(plan.num_states, num_heads, 2, dtype=torch.float32, device=out.device)
    for items in (plan.items, plan.late):
        _launch(items, plan, query, keys, values, sinks, out, states, sums, block_size, scale, window, softcap)
    if len(plan.merges):
        heads = 16
        _merge_splits[len(plan.merges), triton.cdiv(num_heads, heads)](
            sinks, out, states, sums, plan.merges, plan.bases, plan.positions, num_heads, FAR if window is None else window,
            value_size=values.shape[3], value_padded=power_of_two(values.shape[3]), heads=heads, split=SPLIT,
            has_sinks=sinks is not None, **EXACT,
        )  # fmt: skip
    return out


def _launch(
    items: Tensor, plan: DevicePlan, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, out: Tensor, states: Tensor,
    sums: Tensor, block_size: int, scale: float, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    if len(items) == 0:
        return
    num_kv_heads, size, value_size = keys.shape[1], keys.shape[3], values.shape[3]
    group = query.shape[1] // num_kv_heads
    lanes = lanes_of(query.dtype, group)
    heads, room = min(group, lanes), _room(lanes, max(size, value_size), query.itemsize)
    _attend[(len(items), num_kv_heads * triton.cdiv(group, heads))](
        query, keys, values, sinks, out, states, sums, items, plan.table, plan.paths, plan.positions, plan.bases,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], plan.table.stride(0), plan.paths.stride(0),
        query.shape[1], scale, softcap or 1.0, FAR if window is None else window, is_late=items is plan.late, block_size=block_size,
        group=group, heads=heads, size=size, value_size=value_size, padded=power_of_two(size), value_padded=power_of_two(value_size),
        lanes=lanes, tile=KEY_TILE, split=SPLIT, fields=FIELDS, fresh=FRESH, resumed=RESUMED,
        has_softcap=softcap is not None, has_sinks=sinks is not None, **room, **EXACT,
    )  # fmt: skip


def _room(lanes: int, widest: int, itemsize: int) -> dict[str, int]:
    """Threads, registers and shared memory, by what the compiler says a program takes: a processor of an H200 holds three programs of 16
    lanes, two of others, and one of wide heads; of heads wider than 256 it has room for one tile at a time.
    """
    if widest > 128:
        return {"num_warps": 8, "num_stages": 3 if widest <= 256 else 1}
    room = {"num_warps": 4, "num_stages": 4 if lanes == 64 else 5}
    return room | {"maxnreg": 168} if lanes == 16 and itemsize == 2 else room
