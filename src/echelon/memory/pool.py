"""How the pool of keys and values is sized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from echelon.errors import ConfigError
from echelon.inputs import shown
from echelon.sizes import mebibytes

AUTO_SHARE = {"cpu": 0.5, "cuda": 0.8}  # of the memory that is available once the weights are loaded; a device is the model's own


@dataclass(frozen=True)
class PoolPlan:
    """The KV pool: how many blocks of target and draft model or head together, and why so many."""

    num_blocks: int
    block_size: int
    block_bytes: int  # one block of every model
    reason: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.block_bytes

    def __str__(self) -> str:
        tokens = self.num_blocks * self.block_size
        size = f"{self.num_blocks:,} blocks of {self.block_size} tokens = {tokens:,} tokens, {mebibytes(self.kv_bytes)}"
        return f"KV pool: {size} ({self.reason})"


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that a text of so many tokens takes."""
    return -(-num_tokens // block_size)


def block_bytes(bytes_per_token: int, block_size: int, boundary_bytes: int = 0) -> int:
    """Bytes of a block of every model, and of what is kept of it besides."""
    return bytes_per_token * block_size + boundary_bytes


def available_memory(device: torch.device) -> int:
    """Bytes that could still be taken; on a CUDA device also those that PyTorch holds and nothing uses."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def plan_kv(
    bytes_per_token: int,
    block_size: int,
    max_num_seqs: int,
    max_len: int,
    limit: int | Literal["auto"],
    device: torch.device,
    num_null_blocks: int = 0,
    boundary_bytes: int = 0,
    working_bytes: int = 0,
) -> PoolPlan:
    """Size the pool. `bytes_per_token` counts keys and values of all layers of all models; `boundary_bytes` are kept
    of each block besides.

    "auto" takes what `max_num_seqs` rows of full length could use, at most half of the memory that is available beside the `working_bytes`
    of a step, or four fifths of that of a CUDA device. `num_null_blocks` are taken beside the pool, within the same bounds (`KVCache`).

    Raises
    ------
    ConfigError  the limit holds not one block, or is more than the memory that is available
    """
    of_block, available = block_bytes(bytes_per_token, block_size, boundary_bytes), available_memory(device)
    if limit != "auto" and limit > available:
        raise ConfigError(
            f"kv_cache_memory_bytes = {shown(limit)} exceeds the {available:,} bytes that are available on {device.type}; lower it, or "
            "leave it to 'auto'"
        )
    share = AUTO_SHARE[device.type]
    available = max(0, available - working_bytes)
    num_blocks = (int(available * share) if limit == "auto" else limit) // of_block - num_null_blocks
    reason = "kv_cache_memory_bytes"
    if limit == "auto":
        wanted, reason = max_num_seqs * num_blocks_for(max_len, block_size), f"auto: {max_num_seqs} rows of {max_len:,} tokens"
        if num_blocks < wanted:
            reason = f"auto: {share:.0%} of {mebibytes(available)} available; {max_num_seqs} rows of {max_len:,} tokens would want more"
        num_blocks = min(wanted, num_blocks)
    if num_blocks < 1 and limit == "auto":
        raise ConfigError(
            f"beside the {mebibytes(working_bytes)} of a step {mebibytes(int(available * share))} may be taken for keys and values, less "
            f"than one block of {block_size} tokens ({mebibytes((1 + num_null_blocks) * of_block)}); lower max_num_seqs, "
            "max_num_batched_tokens or the length of drafts"
        )
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes = {limit} holds no block of {block_size} tokens ({of_block:,} bytes); give at least "
            f"{(1 + num_null_blocks) * of_block:,}"
        )
    return PoolPlan(num_blocks, block_size, of_block, reason)
