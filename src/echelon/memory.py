"""Bytes of what the engine keeps, and how the KV pool is sized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from echelon.errors import ConfigError
from echelon.inputs import shown

AUTO_SHARE = {"cpu": 0.5, "cuda": 0.8}  # of the memory that is available once the weights are loaded; a device is the model's own


@dataclass(frozen=True)
class MemoryPlan:
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


def mebibytes(count: int) -> str:
    """Bytes as text, in MiB."""
    return f"{count / 2**20:,.1f} MiB"


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
) -> MemoryPlan:
    """Size the pool. `bytes_per_token` counts keys and values of all layers of all models; `boundary_bytes` are kept
    of each block besides.

    "auto" takes what `max_num_seqs` rows of full length could use, at most half of the available memory, or four
    fifths of that of a CUDA device. `num_null_blocks` are taken beside the pool, within the same bounds (`KVCache`).

    Raises
    ------
    ConfigError  the limit holds not one block, or is more than the memory that is available
    """
    block_bytes, available = bytes_per_token * block_size + boundary_bytes, available_memory(device)
    if limit != "auto" and limit > available:
        raise ConfigError(
            f"kv_cache_memory_bytes = {shown(limit)} exceeds the {available:,} bytes that are available on {device.type}; lower it, or "
            "leave it to 'auto'"
        )
    share = AUTO_SHARE[device.type]
    num_blocks = (int(available * share) if limit == "auto" else limit) // block_bytes - num_null_blocks
    reason = "kv_cache_memory_bytes"
    if limit == "auto":
        wanted, reason = max_num_seqs * -(-max_len // block_size), f"auto: {max_num_seqs} rows of {max_len:,} tokens"
        if num_blocks < wanted:
            reason = f"auto: {share:.0%} of {mebibytes(available)} available; {max_num_seqs} rows of {max_len:,} tokens would want more"
        num_blocks = min(wanted, num_blocks)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes = {limit} holds no block of {block_size} tokens ({block_bytes:,} bytes); give at least "
            f"{(1 + num_null_blocks) * block_bytes:,}"
        )
    return MemoryPlan(num_blocks, block_size, block_bytes, reason)
