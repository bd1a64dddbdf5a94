"""Realigned rows (Zhang et al. 2025, "Batch Speculative Decoding Done Right").

EQSPEC (`pack`): before each step every row's keys and values are shifted so that all rows end at the same slot; the padding is on the
left alone, and inputs are padded to the longest row. EXSPEC (`pack_group`): every sequence keeps its keys and values for itself, and the
rows that run together are copied into a rectangle for the step; rows of equal length need no padding in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.baselines.batch import PaddedBatch
from echelon.baselines.layout import Keys, Rows, anchored_slots, loaded_keys, own_slots, padded_batch, rows_by_line
from echelon.baselines.lines import LineTables
from echelon.batch import Span


def pack(spans: Sequence[Span], tables: LineTables) -> PaddedBatch:
    """Pack one left-padded rectangle, aligned first."""
    tables.compact()
    rows = rows_by_line(spans, tables)
    tables.align(rows.num_known(len(tables.positions)))
    slots = anchored_slots(rows, tables)
    tables.write(rows.lines[rows.row_of], slots, own_slots(rows))
    return padded_batch(rows, tables, slots, loaded_keys(rows, tables), pads_inputs=True)


def pack_group(spans: Sequence[Span], tables: LineTables) -> PaddedBatch:
    """Pack rows of a pool, copied together; a token's slot in the pool is its position."""
    rows = rows_by_line(spans, tables)
    slots = own_slots(rows)
    tables.write(rows.lines[rows.row_of], slots, slots)
    return padded_batch(rows, tables, slots, _copied_keys(rows, tables), pads_inputs=True)


def _copied_keys(rows: Rows, tables: LineTables) -> Keys:
    """Columns such that every row's last known token stands in the same one; equal lengths leave no padding on the left.

    Equal rows in neighbouring lines (a row alone, for one) are a rectangle as they lie, and nothing is copied.
    """
    num_known = rows.starts + rows.counts - rows.drafted
    shifts = num_known.max() - num_known
    lengths = rows.starts + rows.counts
    positions = np.arange(int((shifts + lengths).max())) - shifts[:, None]
    positions[(positions < 0) | (positions >= lengths[:, None])] = -1
    first, end = int(rows.lines[0]), int(rows.lines[-1]) + 1
    num_held = int(tables.ends.sum())
    if end - first == len(rows.lines) and not shifts.any():
        return Keys((first, end), (0, positions.shape[1]), None, positions.astype(np.int32), num_held)
    gathered = rows.lines[:, None] * tables.num_slots + np.maximum(positions, 0)
    return Keys((first, end), (0, 0), gathered, positions.astype(np.int32), num_held + positions.size)
