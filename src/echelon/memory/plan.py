"""The memory plan: every byte that a process with one engine holds at its peak, before it holds any.

The terms are those of SpecMemo (Yildirim and Chen 2025): weights, heads, keys and values of the planned conversation, and what grows with
the nodes of a draft. They are sums of shapes, so a plan for a model is the same whether its weights have been read or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from echelon.config import EngineConfig
from echelon.drafters.heads import MOST_UNREAD, AttachedHead
from echelon.memory.footprint import Footprint
from echelon.memory.pool import PoolPlan, block_bytes, num_blocks_for
from echelon.methods import METHODS
from echelon.model.patches.linear import packed_weights
from echelon.scheduler import PROMPT_LOGITS
from echelon.speculative_config import SpeculativeConfig, most_drafted

GROWTH = 64 * 2**20  # bytes of code and of small objects that a process takes up between its imports and its first answers
DEVICE_RUNTIME = 768 * 2**20  # a CUDA context with compiled kernels
LOGIT_BYTES = 4  # bytes of a logit


@dataclass(frozen=True)
class HeadFootprint:
    """Bytes of a head that drafts.

    weights          with the packed copies that its linear layers read
    bytes_per_token  of its own keys and values; 0 where it has none
    feature_bytes    of the target's hidden states that it reads, per token
    """

    weights: int
    bytes_per_token: int
    feature_bytes: int

    @property
    def boundary_bytes(self) -> int:
        """Bytes kept of each block, so that a text can be resumed behind it."""
        return self.feature_bytes if self.bytes_per_token else 0


def footprint_of_head(attached: AttachedHead) -> HeadFootprint:
    """A head that is loaded, on its target."""
    head = attached.head
    own = {p.untyped_storage().data_ptr() for p in head.parameters()}
    weights = sum(p.numel() * p.element_size() for p in head.parameters())
    weights += sum(w.data.nbytes for w in packed_weights(head) if w.data.untyped_storage().data_ptr() not in own)
    stored = {name: t for name, t in head.state_dict().items() if t.is_floating_point()}  # no ids, which are little
    weights += sum(stored[name].nbytes for name, _ in head.named_buffers() if name in stored)  # Clover's rows of the output layer
    features = int(attached.reader.example().shape[-1]) * head.dtype.itemsize
    return HeadFootprint(weights, attached.bytes_per_token, features)


@dataclass(frozen=True)
class Residents:
    """What is in memory besides the engine's own: the target, what drafts, and the process as it was before them.

    shared    bytes of the draft model that are the target's own once both are loaded
    captures  passes are captured as CUDA graphs: they keep a block that no row gets, and what each of them gives back
    """

    target: Footprint
    draft: Footprint | None = None
    head: HeadFootprint | None = None
    shared: int = 0
    runtime: int = 0
    captures: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for, and the pool of keys and values.

    terms    of the peak while requests run
    loading  bytes by which loading exceeds that, if it does
    """

    terms: dict[str, int]
    loading: int
    pool: PoolPlan

    @property
    def total_bytes(self) -> int:
        """The peak of the process."""
        return sum(self.terms.values()) + self.loading

    @property
    def tree_bytes(self) -> int:
        """What grows with the drafted tokens of a row: their keys and values, and logits."""
        return self.terms["nodes in flight"] + self.terms["logits and sampling"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"total_bytes": self.total_bytes, "terms": self.terms | {"loading": self.loading}, "num_kv_blocks": self.pool.num_blocks}


def process_bytes(device: torch.device, loaded: int = 0) -> int:
    """What the process takes without models: on a CPU what it has now, less `loaded` bytes of models, and what its code still takes up."""
    return DEVICE_RUNTIME if device.type == "cuda" else max(0, int(psutil.Process().memory_info().rss) - loaded) + GROWTH


def are_captured(config: EngineConfig, device: torch.device) -> bool:
    """Whether an engine's passes become CUDA graphs."""
    return not config.enforce_eager and device.type == "cuda" and torch.cuda.is_available()


def plan_memory(config: EngineConfig, spec: SpeculativeConfig | None, residents: Residents, max_len: int) -> MemoryPlan:
    """Count the bytes of an engine with `max_num_seqs` rows of `max_len` tokens, each with its drafts, at their peak."""
    target, draft, head = residents.target, residents.draft, residents.head
    rows, nodes = config.max_num_seqs, most_drafted(spec)
    per_token, boundary = bytes_kept(config, residents)
    size, of_texts = config.block_size, rows * num_blocks_for(max_len, config.block_size)
    of_rows = rows * num_blocks_for(max_len + nodes, size)
    if config.kv_cache_memory_bytes != "auto":
        of_rows = max(1, config.kv_cache_memory_bytes // block_bytes(per_token, size, boundary))
        of_texts = min(of_texts, of_rows)
    elif residents.captures:
        of_rows += 1
    pool = PoolPlan(of_rows, size, block_bytes(per_token, size, boundary), f"{rows} rows of {max_len:,} tokens")
    models = {
        "runtime": residents.runtime,
        "tokenizer": target.tokenizer,
        "target weights": target.weights,
        "draft weights": draft.weights - residents.shared if draft else head.weights if head else 0,
    }
    serving = {
        "keys and values": of_texts * size * per_token,
        "nodes in flight": (of_rows - of_texts) * size * per_token,
        "boundary states": of_rows * boundary,
        "logits and sampling": logit_bytes(config, spec, residents),
        "logits of prompts": prompt_logit_bytes(target),
        "activations": activation_bytes(config, spec, residents, max_len),
        "captured passes": captured_bytes(config, spec, residents),
    }
    while_read = max(target.loading, draft.weights + draft.loading if draft else 0)
    held = models["draft weights"] + sum(serving.values())
    return MemoryPlan(models | serving, max(0, while_read - held), pool)


def bytes_kept(config: EngineConfig, residents: Residents) -> tuple[int, int]:
    """Bytes of keys and values of one token in all models and heads, on all ranks, and of what is kept of each block besides."""
    head, is_rounded = residents.head, config.kv_cache_dtype == "int8"
    of_models = config.tensor_parallel_size * residents.target.bytes_per_token(is_rounded)
    of_models += residents.draft.bytes_per_token(is_rounded) if residents.draft else 0
    boundary = head.boundary_bytes if head and config.enable_prefix_caching else 0
    return of_models + (head.bytes_per_token if head else 0), boundary


def working_bytes(config: EngineConfig, spec: SpeculativeConfig | None, residents: Residents, max_len: int) -> int:
    """What the largest step holds beside weights, keys and values."""
    logits = logit_bytes(config, spec, residents) + prompt_logit_bytes(residents.target) + captured_bytes(config, spec, residents)
    return logits + activation_bytes(config, spec, residents, max_len)


def logit_bytes(config: EngineConfig, spec: SpeculativeConfig | None, residents: Residents) -> int:
    """Logits of one step and what is made of them: of the target for each row and drafted token; of what drafts for two levels, since the
    memory of the last is still the process's own; with rejection, a draft model's probabilities of each drafted token.
    """
    rows, nodes = config.max_num_seqs, most_drafted(spec)
    places, probabilities = rows * (1 + nodes), 0
    if spec is not None and METHODS[spec.method].needs != "nothing":
        places += rows * min(2 * spec.widest_level, 1 + nodes)
    if spec is not None and spec.acceptance == "rejection" and METHODS[spec.method].needs == "model":
        probabilities = rows * nodes * 8
    return (places * LOGIT_BYTES + probabilities) * residents.target.vocab_size


def captured_bytes(config: EngineConfig, spec: SpeculativeConfig | None, residents: Residents) -> int:
    """What CUDA graphs hold of each model beside the pools: the memory of the widest, which all share, and the logits that each gives
    back, one graph of every size that a step's places are filled up to.
    """
    if not residents.captures:
        return 0
    from echelon.model.graphs.buckets import filled_up  # imports Triton
    from echelon.model.graphs.graphs import MOST_GRAPHS
    from echelon.model.graphs.programs import MOST_TOKENS

    places = min(MOST_TOKENS, config.max_num_seqs * (1 + most_drafted(spec)))
    sizes = sorted({filled_up(n) for n in range(1, places + 1)})[-MOST_GRAPHS:]
    models = [m for m in (residents.target, residents.draft) if m is not None]
    return sum(sum(sizes) * LOGIT_BYTES * m.vocab_size + sizes[-1] * m.pass_bytes for m in models)


def prompt_logit_bytes(target: Footprint) -> int:
    """Logits of a step's prompt tokens, which requests that want `prompt_logprobs` have."""
    return PROMPT_LOGITS * LOGIT_BYTES * target.vocab_size


def fed_tokens(config: EngineConfig, spec: SpeculativeConfig | None, max_len: int) -> int:
    """Tokens of the widest pass."""
    rows = config.max_num_seqs
    return min(config.max_num_batched_tokens, rows * max_len) + rows * most_drafted(spec)


def activation_bytes(config: EngineConfig, spec: SpeculativeConfig | None, residents: Residents, max_len: int) -> int:
    """What the widest pass holds, and the features that a head waits with."""
    rows = config.max_num_seqs
    of_a_token = max(m.pass_bytes for m in (residents.target, residents.draft) if m)
    features = residents.head.feature_bytes if residents.head else 0
    unread = rows * min(MOST_UNREAD, max_len) if features else 0
    return fed_tokens(config, spec, max_len) * (of_a_token + 2 * features) + unread * features
