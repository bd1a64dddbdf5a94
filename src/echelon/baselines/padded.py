"""Padded rows: the vanilla way to batch speculation in a stack with aligned KV access, and EMS-SD's two ablations of it.

`pack` pads both: every row feeds as many tokens as the longest, and all rows share one start in the KV cache, so that a row that accepted
less than the best of the batch is left with dead slots, masked but loaded. `pack_kv` keeps that cache and concatenates the inputs of the
linear layers; `pack_inputs` pads the inputs and gives every row its own start in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.baselines.batch import PaddedBatch
from echelon.baselines.layout import anchored_slots, loaded_keys, own_slots, padded_batch, rows_by_line
from echelon.baselines.lines import LineTables
from echelon.batch import Span


def pack(spans: Sequence[Span], tables: LineTables) -> PaddedBatch:
    """Pack with KV padded and inputs padded."""
    return _shared_start(spans, tables, pads_inputs=True)


def pack_kv(spans: Sequence[Span], tables: LineTables) -> PaddedBatch:
    """Pack with only KV padded: the linear layers see real tokens alone, attention a rectangle."""
    return _shared_start(spans, tables, pads_inputs=False)


def pack_inputs(spans: Sequence[Span], tables: LineTables) -> PaddedBatch:
    """Pack with only inputs padded: a token's slot is its position, and rejected tokens are overwritten."""
    tables.compact()
    rows = rows_by_line(spans, tables)
    slots = own_slots(rows)
    tables.write(rows.lines[rows.row_of], slots, slots)
    return padded_batch(rows, tables, slots, loaded_keys(rows, tables), pads_inputs=True)


def _shared_start(spans: Sequence[Span], tables: LineTables, pads_inputs: bool) -> PaddedBatch:
    tables.compact()
    rows = rows_by_line(spans, tables)
    slots = anchored_slots(rows, tables)
    tables.write(rows.lines[rows.row_of], slots, own_slots(rows))
    return padded_batch(rows, tables, slots, loaded_keys(rows, tables), pads_inputs)
