"""Ragged attention: compiled (csrc/attention.h) where the extension was built, else its definition in `reference`; on CUDA by Triton."""

from __future__ import annotations

from torch import Tensor

from echelon.batch import RaggedBatch
from echelon.ops import devices, reference
from echelon.ops.compiled import is_built, kernels


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
    """Causal attention of every new token over its row's keys and values, which have been written already; in a tree, over those of the
    text and of its own ancestors.

    query [T, H, D], keys [blocks, Hkv, block_size, D], values [blocks, Hkv, block_size, Dv], sinks [H] or None → [T, H, Dv] in the query's
    dtype, which is that of the cache. Softmax runs online in float32 over key tiles at multiples of a fixed size from position 0 (Milakov
    and Gimelshein 2018); a row's keys and values are read once for all heads of a group and up to 64 (token, head) pairs.
    """
    if devices.by_triton(query):
        from echelon.ops.triton import attention as on_device  # imports Triton

        return on_device.ragged_attention(query, keys, values, batch, scale, window, softcap, sinks)
    if not is_built():
        return reference.ragged_attention(query, keys, values, batch, scale, window, softcap, sinks)
    where = (batch.positions, batch.indptr, batch.block_table, batch.block_size)
    trees = (batch.parents, batch.node_indptr, batch.text_lens)
    out: Tensor = kernels.ragged_attention(query, keys, values, *where, scale, window, softcap, sinks, *trees)
    return out
