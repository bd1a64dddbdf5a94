"""What drafting costs a step, counted from a head's own code on the meta device, and how many tokens a step come of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon.errors import ConfigError
from echelon.estimate.devices import Device, Work
from echelon.estimate.layout import Held, model_parts
from echelon.estimate.roofline import ModelShape
from echelon.estimate.shapes import PaperModel, without_weights
from echelon.heads.checkpoints import build_head
from echelon.methods import METHODS, head_class
from echelon.model.attention import CONTEXT_KEYWORD, RecordingAttention
from echelon.speculative_config import OWN_COPY, SpeculativeConfig


class PublishedTokens(NamedTuple):
    """Tokens a step, the target's own included, of a method with so many drafted tokens, and where that is from."""

    tokens: float
    drafted: int
    source: str


# by method and whether it drafts trees; greedy, and accepted exactly
PUBLISHED = {
    ("ngram", False): PublishedTokens(1.69, 10, "prompt lookup, Vicuna 13B, mean of six tasks (EAGLE-2, Table 1)"),
    ("medusa", True): PublishedTokens(2.44, 63, "Vicuna 13B, mean of six tasks (EAGLE-2, Table 1)"),
    ("clover2", True): PublishedTokens(3.95, 25, "Vicuna 7B, MT-Bench (Clover-2's repository)"),
    ("eagle", False): PublishedTokens(3.12, 5, "Llama-2 70B, MT-Bench (EAGLE, Table 5)"),
    ("eagle", True): PublishedTokens(4.48, 48, "Llama-2 70B, MT-Bench (EAGLE-2, Table 2)"),
    ("eagle3", True): PublishedTokens(5.88, 60, "Llama-3.3 70B, mean of five tasks (EAGLE-3, Table 1)"),
    ("scylla", True): PublishedTokens(5.28, 60, "Qwen2.5 7B, mean of six tasks (Scylla, Table 4, by a secondary source)"),
}


@dataclass(frozen=True)
class Level:
    """A pass of what drafts: what it multiplies by, and tokens of each row; below 1 where several rows share one."""

    held: Held
    tokens: float


@dataclass(frozen=True)
class Acceptance:
    """Tokens a step by drafted tokens: `tokens` with `drafted` of them. A chain's are those of one chance of acceptance at every place; a
    tree's grow with the logarithm of its nodes.
    """

    tokens: float
    drafted: int
    is_tree: bool

    def at(self, drafted: int) -> float:
        """Tokens a step with another number of drafted tokens."""
        if drafted == self.drafted:
            return self.tokens
        if self.is_tree:
            return 1.0 + (self.tokens - 1.0) * math.log2(1 + drafted) / math.log2(1 + self.drafted)
        return _chain_tokens(self._chance(), drafted)

    def _chance(self) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if _chain_tokens(middle, self.drafted) < self.tokens else (low, middle)
        return high


def _chain_tokens(chance: float, drafted: int) -> float:
    return float(sum(chance**i for i in range(drafted + 1)))


@dataclass(frozen=True)
class DraftingCost:
    """Drafting of one step on the engine's device: its levels, entries of weights that it adds, what it comes to, and bytes of keys and
    values that it keeps of a token.
    """

    levels: tuple[Level, ...]
    numbers: int
    drafted: int
    emitted: float
    kv_bytes: int = 0

    def seconds(self, device: Device, dtype: str, bytes_each: int, rows: int) -> float:
        """Seconds of all levels, for so many rows."""
        return sum(_seconds_of(level, device, dtype, bytes_each, rows) for level in self.levels)


def _seconds_of(level: Level, device: Device, dtype: str, bytes_each: int, rows: int) -> float:
    """Keys and values of what drafts are left out: they are those of a layer or of a small model."""
    shape = ModelShape(level.held.matrices, level.held.features, 0, 0, bytes_each)
    work = Work(shape.flops(rows, level.tokens, 0), shape.bytes(rows, level.tokens, 0))
    return device.seconds(work, dtype) + level.held.layers * device.layer_us * 1e-6


def acceptance_of(spec: SpeculativeConfig, tokens_per_step: float | None) -> Acceptance:
    """What is given, of the most tokens that `spec` drafts, or what has been published of the method.

    Raises
    ------
    ConfigError  nothing is given and nothing has been published, or it cannot be
    """
    most, longest = spec.most_tokens, spec.longest_path
    if tokens_per_step is not None:
        if not 1.0 <= tokens_per_step <= 1 + longest:
            raise ConfigError(
                f"--tokens-per-step {tokens_per_step:g} is not between 1 and {1 + longest}: {longest} tokens are drafted one after the "
                "other at most"
            )
        return Acceptance(tokens_per_step, most, spec.grows_trees)
    published = PUBLISHED.get((spec.method, spec.grows_trees))
    if published is None:
        shape = "trees" if spec.grows_trees else "chains"
        raise ConfigError(f"tokens a step of {shape} of {spec.method!r} are in no table; measure them, and give --tokens-per-step")
    return Acceptance(published.tokens, published.drafted, spec.grows_trees)


def drafting_of(
    spec: SpeculativeConfig, target: PaperModel, acceptance: Acceptance, drafted: int, dtype: str, is_rounded: bool = False
) -> DraftingCost:
    """What `spec` does in a step with `drafted` tokens a row, beside a target without weights. Keys and values of a draft model may be
    rounded, as the target's; a head's are not.

    Raises
    ------
    ConfigError  what drafts cannot be planned on paper
    """
    if spec.quantization is not None:
        raise ConfigError("on paper what drafts has 16 or 32 bits; leave 'quantization' out of the speculative config")
    used = spec if spec.num_speculative_tokens == drafted else replaced(spec, drafted)
    depth, width = used.longest_path, float(used.usual_level)
    emitted = min(acceptance.at(drafted), 1.0 + depth)
    needs = METHODS[spec.method].needs
    if needs == "nothing":
        return DraftingCost((), 0, drafted, emitted)
    if needs == "model":
        held = _draft_model(used, dtype, is_rounded)
        return DraftingCost(
            (Level(held, emitted), *(Level(held, width) for _ in range(depth - 1))), held.numbers, drafted, emitted, held.kv_bytes
        )
    read, extended, output, numbers, kv_bytes = counted_head(spec.method, target, **head_class(spec.method).options_for(depth))
    places = width if extended.matrices else 1.0  # heads that do not look at what was drafted say the same everywhere
    levels = [Level(read, emitted), Level(output, 1.0)]
    for _ in range(depth - 1):
        levels += [Level(extended, places), Level(output, places)]
    return DraftingCost(tuple(level for level in levels if level.held.matrices), numbers, drafted, emitted, kv_bytes)


def replaced(spec: SpeculativeConfig, drafted: int) -> SpeculativeConfig:
    """The same with so many drafted tokens."""
    values = spec.model_dump(exclude_unset=True, exclude={"max_speculative_tokens", "cost_table", "num_speculative_tokens"})
    return SpeculativeConfig(**values, num_speculative_tokens=drafted)


def _draft_model(spec: SpeculativeConfig, dtype: str, is_rounded: bool) -> Held:
    if spec.model is None or spec.own_copy is not None:
        raise ConfigError(f"on paper the draft model is a shape or a folder, not {spec.model!r} ({OWN_COPY}…); give the key 'model'")
    (parts,) = model_parts(without_weights(spec.model, dtype), is_rounded=is_rounded)
    return sum(parts.layers, parts.before + parts.after)


def counted_head(method: str, target: PaperModel, **options: Any) -> tuple[Held, Held, Held, int, int]:
    """What a head multiplies by when it reads a token of the text, when it goes on from a drafted one, and for logits; the entries of its
    weights, and bytes of a token's keys and values.
    """
    with torch.device("meta"):
        head = build_head(method, target.model, **options).to(target.model.dtype)
        features = torch.zeros(1, len(head.hidden_state_names) * target.hidden_size, dtype=target.model.dtype)
        zero, reading = torch.zeros(1, dtype=torch.int64), RecordingAttention()
    calls: list[Callable[[Any], Any]] = [
        lambda _: head.encode(features, zero, zero, **{CONTEXT_KEYWORD: reading}),
        lambda states: head.extend(states, zero, zero, 1, **{CONTEXT_KEYWORD: RecordingAttention()}),
        lambda states: (head.draft_logits(states, 0), states)[1],
    ]
    found, states = [], None
    with torch.inference_mode():
        for call in calls:
            with _counting(head, target.model) as held:
                states = call(states)
            found.append(sum(held, Held()))
    kv_bytes = sum(shape.bytes_per_token(target.dtype) for shape in reading.shapes.values())
    return found[0], found[1], found[2], sum(t.numel() for t in (*head.parameters(), *head.buffers())), kv_bytes


@contextmanager
def _counting(*modules: nn.Module) -> Iterator[list[Held]]:
    """What linear layers of these modules are run meanwhile."""
    seen: list[Held] = []

    def note(module: nn.Module, _: Any, __: Any) -> None:
        assert isinstance(module, nn.Linear)
        columns, depth = module.weight.shape
        seen.append(Held(matrices=columns * depth, features=columns + depth))

    linear = {m for module in modules for m in module.modules() if isinstance(m, nn.Linear)}
    hooks = [m.register_forward_hook(note) for m in linear]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
