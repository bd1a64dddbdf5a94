"""Heads: drafting step by step is the same as the parallel pass they are trained by; layouts; refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from echelon import ConfigError, ModelLoadError, UnsupportedModelError
from echelon.batch import Span
from echelon.cli.convert import convert
from echelon.heads.base import Head
from echelon.heads.checkpoints import build_head, load_head, save_head
from echelon.heads.clover import CloverHead
from echelon.heads.eagle3 import default_depths
from echelon.heads.parts import Norm, Rotary, copy_last_layer, copy_norm, head_config, llama_layers, prepare
from echelon.kv.blocks import BlockTables
from echelon.kv.cache import KVCache, LayerShape
from echelon.methods import head_class
from echelon.model import pack as unpadded
from echelon.model.attention import CONTEXT_KEYWORD, CachedAttention
from echelon.train.examples import Examples, Teacher, TrainingAttention, unroll

VOCABULARY, HIDDEN, DEPTH = toys.VOCABULARY, 64, 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"num_heads": DEPTH}),
    "medusa-own-output": ("medusa", {"num_heads": DEPTH, "num_layers": 2, "own_output": True}),
    "clover": ("clover", {"num_heads": DEPTH}),
    "clover-own-rows": ("clover", {"num_heads": DEPTH, "own_rows": True}),
    "clover-without-attention": ("clover", {"num_heads": DEPTH, "attention_decoder": False}),
    "clover-without-augmenting": ("clover", {"num_heads": DEPTH, "augmenting": False}),
    "clover2": ("clover2", {}),
    "clover2-own-rows": ("clover2", {"own_rows": True}),
    "eagle": ("eagle", {"bias": True}),
    "scylla": ("scylla", {"num_layers": 3}),
    "scylla-without-norm": ("scylla", {"num_layers": 1, "norm": False}),
    "eagle3": ("eagle3", {"draft_vocab_size": 40}),
    "eagle3-normed-residual": ("eagle3", {"norm_before_residual": True}),
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = toys.llama(num_hidden_layers=4, tie_word_embeddings=True, spread=0.1)
    model.set_attn_implementation("sdpa")
    return model.requires_grad_(False)


def shaken(kind: str, target: PreTrainedModel) -> Any:
    """A head as its training begins, its weights moved at random so that no block is the identity."""
    method, options = KINDS[kind]
    torch.manual_seed(1)
    head: Any = build_head(method, target, **options)
    if method == "eagle3":
        head.choose_vocabulary(torch.arange(VOCABULARY) * 7 % VOCABULARY)
    head.start_from(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return head.eval().requires_grad_(False)


class Drafting:
    """A head as the engine runs it: ragged batches, keys and values in blocks, drafts forgotten again."""

    def __init__(self, head: Head) -> None:
        self.head = head
        num_layers = len(getattr(head, "layers", []))
        self.tables = BlockTables(64, 4, 16)
        self.cache = KVCache([LayerShape(2, 16, 16)] * num_layers, self.tables, torch.float32, torch.device("cpu"))

    def _context(self, spans: list[Span]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        for span in spans:
            assert self.tables.reserve(span.row, span.start + len(span.tokens))
        batch = unpadded.pack(spans, self.tables)
        return batch.tokens.long(), batch.positions.long(), {CONTEXT_KEYWORD: CachedAttention(batch, self.cache)}

    def read(self, pieces: dict[int, tuple[int, Tensor, list[int]]]) -> dict[int, Tensor]:
        """Row → (start, features [n, F], following tokens): the state of each row's last place."""
        spans = [Span(row, start, tokens, 0, start + len(tokens)) for row, (start, _, tokens) in pieces.items()]
        tokens, positions, context = self._context(spans)
        states = self.head.encode(torch.cat([features for _, features, _ in pieces.values()]), tokens, positions, **context)
        ends = torch.tensor([len(s.tokens) for s in spans]).cumsum(0) - 1
        for span in spans:
            self.tables.advance(span.row, span.start + len(span.tokens))
        return dict(zip(pieces, states[ends], strict=True))

    def draft(self, states: dict[int, Tensor], paths: dict[int, list[int]]) -> dict[int, list[Tensor]]:
        """Row → states at depths 0, 1, … along its path; then the rows are as before."""
        known = {row: self.tables.num_cached(row) for row in states}
        found = {row: [state] for row, state in states.items()}
        for depth in range(1, DEPTH):
            spans = [Span(row, known[row] + depth - 1, [paths[row][depth - 1]], 0, known[row], 1) for row in states]
            tokens, positions, context = self._context(spans)
            new = self.head.extend(torch.stack([f[-1] for f in found.values()]), tokens, positions, depth, **context)
            for row, state in zip(found, new, strict=True):
                found[row].append(state)
        for row, count in known.items():
            self.tables.commit(row, count)
            for storage in (*self.cache.keys, *self.cache.values):
                storage[~self.cache.held_slots().view(storage.shape[0], -1)[:, None].expand(storage.shape[:3])] = torch.nan
        return found


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_drafting_is_what_training_computes(kind: str, target: PreTrainedModel) -> None:
    """Places of two rows, read in uneven pieces, drafted from, forgotten and read on."""
    head = shaken(kind, target)
    ids = torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(3))
    given = Teacher(target, head).examples(ids, DEPTH, False)
    parallel = [s.unflatten(0, (2, -1)) for s in unroll(head, given, given.features, DEPTH)]
    features = given.features.unflatten(0, (2, -1))
    drafting = Drafting(head)
    cuts = {0: [0, 5, 6, 11, 16], 1: [0, 1, 3, 9, 10]}
    for i in range(4):
        ends = {row: cuts[row][i + 1] for row in cuts}
        pieces = {r: (cuts[r][i], features[r, cuts[r][i] : e], ids[r, cuts[r][i] + 1 : e + 1].tolist()) for r, e in ends.items()}
        found = drafting.draft(drafting.read(pieces), {r: ids[r, e + 1 :].tolist() for r, e in ends.items()})
        for row, end in ends.items():
            for depth, state in enumerate(found[row]):
                torch.testing.assert_close(state, parallel[depth][row, end - 1], rtol=1e-5, atol=1e-5)
                ours, theirs = (head.logits(s[None], depth) for s in (state, parallel[depth][row, end - 1]))
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_has_the_shapes_it_promises(kind: str, target: PreTrainedModel) -> None:
    head = shaken(kind, target)
    ids = torch.randint(0, VOCABULARY, (1, 12))
    with torch.no_grad():
        given = Teacher(target, head).examples(ids, DEPTH, True)
        assert given.features.shape == (8, len(head.hidden_state_names) * HIDDEN)
        for depth, states in enumerate(unroll(head, given, given.features, DEPTH)):
            assert head.logits(states, depth).shape == (8, VOCABULARY)
    assert head.method == KINDS[kind][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_learns_as_llamas_does(dtype: torch.dtype) -> None:
    """Value and gradients of more rows than are done at a time, read at a stride as one half of a wider tensor; Llama's in float32."""
    generator = torch.Generator().manual_seed(7)
    wide, upstream = torch.randn(1, 700, 64, generator=generator).to(dtype), torch.randn(1, 700, 32, generator=generator).to(dtype)
    found = []
    for norm, values in ((Norm(32, 1e-5), wide), (LlamaRMSNorm(32, 1e-5), wide.float())):
        norm.weight.data.copy_(torch.linspace(0.5, 2, 32))
        x = values.clone().requires_grad_()
        out = norm(x.chunk(2, -1)[1])
        out.backward(upstream.to(out.dtype))
        found.append((out, x.grad, norm.weight.grad))
    assert found[0][0].dtype == found[0][1].dtype == dtype and found[0][2].dtype == torch.float32
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype))


def test_norms_start_as_what_the_targets_multiply_by() -> None:
    """Gemma's multiply by 1 + w."""
    for cls, config, offset in ((GemmaForCausalLM, GemmaConfig, 1.0), (LlamaForCausalLM, LlamaConfig, 0.0)):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        model: Any = cls(config(vocab_size=50, head_dim=16, **sizes))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = torch.randn(len(parameter), generator=generator)
        norm, layers = LlamaRMSNorm(32), llama_layers(head_config(model.config), 1)
        copy_norm(norm, model)
        copy_last_layer(layers, model)
        theirs = model.model.layers[0]
        assert torch.equal(norm.weight, model.model.norm.weight + offset)
        assert torch.equal(layers[0].input_layernorm.weight, theirs.input_layernorm.weight + offset)
        assert torch.equal(layers[0].mlp.up_proj.weight, theirs.mlp.up_proj.weight)


@pytest.mark.parametrize("method", ["medusa", "clover", "clover2", "eagle", "eagle3", "scylla"])
def test_no_head_looks_ahead(method: str, target: PreTrainedModel) -> None:
    """The state of place t may know tokens up to t + 1 at depth 0, one more at each depth, and nothing after."""
    head = shaken(method, target)
    ids = torch.randint(0, VOCABULARY, (1, 14), generator=torch.Generator().manual_seed(5))
    place = 6

    def states(tokens: Tensor) -> list[Tensor]:
        with torch.no_grad():
            given = Teacher(target, head).examples(tokens, DEPTH, False)
            return [s[place] for s in unroll(head, given, given.features, DEPTH)]

    for changed in range(place + 1, place + 2 + DEPTH):
        other = ids.clone()
        other[0, changed] = (other[0, changed] + 1) % VOCABULARY
        for depth, (before, after) in enumerate(zip(states(ids), states(other), strict=True)):
            first_unseen = place + 2 + depth
            if changed >= first_unseen:
                assert torch.equal(before, after)
            elif method != "medusa":
                assert not torch.equal(before, after), f"depth {depth} has not taken in the token at {changed}"


def test_examples_line_up_with_the_text(target: PreTrainedModel) -> None:
    """Depth k is judged by the token at t + 2 + k, and by what the target says before it."""
    ids = torch.randint(0, VOCABULARY, (2, 12))
    with torch.no_grad():
        head: Any = SimpleNamespace(hidden_state_names=("last", "last_unnormed", "layer:0"), draft_ids=None)
        given: Examples = Teacher(target, head).examples(ids, DEPTH, True)
        out = target(input_ids=ids, output_hidden_states=True)
    assert given.num_positions == 12 - 1 - DEPTH
    for depth in range(DEPTH):
        assert torch.equal(given.token(2 + depth).view(2, -1), ids[:, 2 + depth : 2 + depth + given.num_positions])
        at = slice(1 + depth, 1 + depth + given.num_positions)
        probs, is_drafted = given.wanted(depth)
        assert torch.equal(probs, out.logits[:, at].softmax(-1)) and bool(is_drafted.all())
        assert torch.equal(given.target_feature(depth), out.hidden_states[-1][:, at].flatten(0, 1))
    last, unnormed, first = given.features.view(2, -1, 3 * HIDDEN).chunk(3, -1)
    assert torch.equal(last, out.hidden_states[-1][:, : given.num_positions])
    assert torch.equal(target.get_decoder().norm(unnormed), last)
    assert torch.equal(first, out.hidden_states[0][:, : given.num_positions])


def test_untrained_heads_begin_where_their_papers_say(target: PreTrainedModel) -> None:
    hidden, tokens, positions = torch.randn(5, HIDDEN), torch.arange(5), torch.arange(5)
    medusa: Any = build_head("medusa", target, num_heads=2)
    clover: Any = build_head("clover", target, augmenting=False)
    for head in (medusa, clover):
        states = head.encode(hidden, tokens, positions)
        states = head.extend(states, tokens, positions, 1)
        assert torch.equal(states, hidden)
        torch.testing.assert_close(head.logits(states, 1), target.get_output_embeddings()(hidden))
    own: Any = build_head("medusa", target, num_heads=2, own_output=True)
    own.start_from(target)
    torch.testing.assert_close(own.logits(hidden, 1), target.get_output_embeddings()(hidden))


def test_clover_without_its_blocks_is_medusa(target: PreTrainedModel) -> None:
    clover: Any = build_head("clover", target, augmenting=False, regressive=False, attention_decoder=False)
    medusa: Any = build_head("medusa", target, num_heads=3)
    with torch.no_grad():
        for ours, theirs in zip(clover.heads, medusa.blocks, strict=True):
            ours.linear.weight.normal_()
            theirs[0].load_state_dict(ours.state_dict())
    assert sum(p.numel() for p in clover.parameters()) == sum(p.numel() for p in medusa.parameters())
    assert clover.hidden_state_names == medusa.hidden_state_names
    hidden, tokens = torch.randn(4, HIDDEN), torch.arange(4)
    for depth in range(3):
        ours, theirs = (h.extend(h.encode(hidden, tokens, tokens), tokens, tokens, depth) for h in (clover, medusa))
        assert torch.equal(clover.logits(ours, depth), medusa.logits(theirs, depth))


def test_layers_begin_as_the_targets_last(target: PreTrainedModel) -> None:
    last = target.get_decoder().layers[-1].state_dict()
    for method in ("clover", "clover2"):
        head: Any = build_head(method, target)
        head.start_from(target)
        for layer in head.layers:
            assert all(torch.equal(last[k], v) for k, v in layer.state_dict().items())


def test_eagle3_drafts_from_its_own_vocabulary(target: PreTrainedModel) -> None:
    head = shaken("eagle3", target)
    counts = torch.arange(VOCABULARY) * 7 % VOCABULARY
    wanted = counts.argsort(descending=True)[:40].sort().values
    assert torch.equal(head.draft_ids, wanted)
    logits = head.logits(torch.randn(3, HIDDEN), 0)
    assert torch.equal(torch.isfinite(logits).any(0), head.t2d)
    assert int(head.t2d.sum()) == 40


def attended(attention: Any, x: Tensor) -> Tensor:
    """What an attention layer makes of a text of one token: its value, whatever the query."""
    value = attention.v_proj(x).unflatten(-1, (2, 16)).repeat_interleave(2, -2).flatten(-2)
    out: Tensor = attention.o_proj(value)
    return out


def one_layer(layer: Any, x: Tensor) -> Tensor:
    x = x + attended(layer.self_attn, layer.input_layernorm(x))
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


def cosine_gated(cell: Any, x: Tensor, e: Tensor) -> Tensor:
    q, k, v = (y.view(4, 16) for y in (cell.q(cell.input_layernorm(x)), cell.k(e), cell.v(e)))
    weights = [torch.dot(a, b) / (a.norm() * b.norm()) for a, b in zip(q, k, strict=True)]
    return x + torch.cat([w * y for w, y in zip(weights, v, strict=True)])


def silu_gated(cell: Any, x: Tensor, e: Tensor) -> Tensor:
    q, k, v = (y.view(4, 16) for y in (cell.q(cell.input_layernorm(x)), cell.k(e), cell.v(e)))
    y = torch.cat([torch.dot(a, b) * c for a, b, c in zip(q, k, v, strict=True)])
    return x + y / (1 + torch.exp(-y))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["clover", "clover2", "eagle", "eagle3", "eagle3-normed-residual", "scylla"])
def test_the_equations_of_the_papers(kind: str, target: PreTrainedModel) -> None:
    """A text of one token, by hand: the state, and without attention the one after it."""
    head = shaken(kind, target)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(len(head.hidden_state_names) * HIDDEN, generator=generator)
    first, second = torch.tensor([11]), torch.tensor([42])
    e, e2 = (target.get_input_embeddings()(t)[0] for t in (first, second))
    if kind == "clover":
        state = silu_gated(head.cell, head.norm(one_layer(head.layers[0], features)), e / e.norm())
        after = silu_gated(head.cell, state, e2 / e2.norm())
    elif kind == "clover2":
        x = cosine_gated(head.clover_head_mlp_rnn, features, e)
        for layer in head.layers:
            x = one_layer(layer, x)
        g = head.clover_norm(x)
        state = torch.cat([g, head.clover_head_norm(head.clover_head_mlp(g))])
        x = cosine_gated(head.clover_head_mlp_rnn2, g, e2)
        after = torch.cat([x, head.clover_head_norm(head.clover_head_mlp2(torch.cat([x, e2])))])
    elif kind in ("eagle", "scylla"):
        x = head.fc(torch.cat([e, features]))
        x = x + attended(head.layers[0].self_attn, x)
        state, after = x + head.layers[0].mlp(head.layers[0].post_attention_layernorm(x)), None
        if kind == "scylla":
            for layer in head.layers[1:]:
                state = one_layer(layer, state)
            state = head.norm.weight * state / (state.square().mean() + head.config.rms_norm_eps).sqrt()
    else:
        layer, g = head.layers[0], head.fc(features)
        normed = layer.hidden_norm(g)
        x = (normed if "normed" in kind else g) + attended(layer.self_attn, torch.cat([layer.input_layernorm(e), normed]))
        state, after = x + layer.mlp(layer.post_attention_layernorm(x)), None
    context, place = {CONTEXT_KEYWORD: TrainingAttention(1)}, torch.tensor([7])
    found = head.encode(features[None], first, place, **context)
    torch.testing.assert_close(found[0], state, rtol=1e-5, atol=1e-5)
    if after is not None:
        torch.testing.assert_close(head.extend(found, second, place + 1, 1, **context)[0], after, rtol=1e-5, atol=1e-5)
    if kind == "eagle3":
        torch.testing.assert_close(head.logits(found, 0)[0, head.draft_ids], head.lm_head(head.norm(state)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layers", "depths"), [(32, (2, 16, 29)), (7, (2, 3, 4)), (4, (1, 2, 3)), (2, (0, 1, 1)), (1, (0, 0, 0))])
def test_three_depths(layers: int, depths: tuple[int, int, int]) -> None:
    assert default_depths(layers) == depths


def test_frequencies_stay_exact_when_a_head_is_cast(target: PreTrainedModel) -> None:
    head = shaken("eagle", target).to(torch.bfloat16)
    assert head.rotary.inv_freq.dtype == torch.float32 and head.fc.weight.dtype == torch.bfloat16
    assert torch.equal(head.rotary.inv_freq, Rotary(head.config).inv_freq)


def test_the_targets_weights_are_not_the_heads(target: PreTrainedModel) -> None:
    shared = {id(p) for p in target.parameters()}
    for kind in KINDS:
        assert not any(id(p) in shared for p in shaken(kind, target).parameters())


# ---- on disk


@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_come_back(kind: str, target: PreTrainedModel, tmp_path: Path) -> None:
    head = shaken(kind, target)
    save_head(head, tmp_path, target)
    again: Any = load_head(str(tmp_path), target)
    assert (again.method, again.options, again.hidden_state_names) == (head.method, head.options, head.hidden_state_names)
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values(), strict=True))
    asked = load_head(str(tmp_path), target, torch.bfloat16)
    assert {p.dtype for p in asked.parameters() if p.is_floating_point()} == {torch.bfloat16}


def test_heads_are_written_as_the_target_has_its_weights(target: PreTrainedModel, tmp_path: Path) -> None:
    """Ids of a smaller vocabulary stay integers."""
    save_head(shaken("eagle3", target), tmp_path, copy.deepcopy(target).bfloat16())
    found = {t.dtype for name, t in load_file(tmp_path / "model.safetensors").items() if name not in {"d2t", "t2d"}}
    assert found == {torch.bfloat16}
    assert load_file(tmp_path / "model.safetensors")["d2t"].dtype == torch.int64


def llama_settings(**changes: Any) -> dict[str, Any]:
    """A configuration as it stands beside published heads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 40,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "torch_dtype": "bfloat16",
        "pad_token_id": 0,
    } | changes


def published(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def renamed(tensors: dict[str, Tensor], **prefixes: str) -> dict[str, Tensor]:
    """`layers_0="midlayer."`: dots in the old prefix are underscores."""
    for old, new in prefixes.items():
        tensors = {new + k.removeprefix(old.replace("_", ".")) if k.startswith(old.replace("_", ".")) else k: v for k, v in tensors.items()}
    return tensors


def test_eagle_as_published(target: PreTrainedModel, tmp_path: Path) -> None:
    head = shaken("eagle", target)
    tensors = head.state_dict() | {"embed_tokens.weight": target.get_input_embeddings().weight}
    again: Any = load_head(published(tmp_path, tensors, llama_settings(bias=True)), target)
    assert again.method == "eagle" and again.options.bias
    assert torch.equal(again.fc.bias, head.fc.bias)
    assert again.config.rope_parameters["rope_theta"] == 5000.0 and again.config.num_hidden_layers == 1


def test_eagle_with_biases_on_queries_keys_and_values_as_published(target: PreTrainedModel, tmp_path: Path) -> None:
    """The authors' `qkv_bias`: the output projection has none."""
    tensors = shaken("eagle", target).state_dict()
    for name in "qkv":
        weight = tensors[f"layers.0.self_attn.{name}_proj.weight"]
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.linspace(-1, 1, len(weight), dtype=weight.dtype)
    again: Any = load_head(published(tmp_path, tensors, llama_settings(bias=True, qkv_bias=True)), target)
    attention = again.layers[0].self_attn
    assert torch.equal(attention.v_proj.bias, tensors["layers.0.self_attn.v_proj.bias"]) and not attention.o_proj.bias.any()


def test_a_copy_of_a_scaled_embedding_is_known(tmp_path: Path) -> None:
    """Gemma multiplies its rows as they are looked up; a head brings them as they are stored."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Gemma3TextConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=4, **shape)
    target = Gemma3ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    rows = target.get_input_embeddings().weight
    assert not torch.equal(target.get_input_embeddings()(torch.arange(VOCABULARY)), rows)
    tensors = shaken("eagle", target).state_dict() | {"embed_tokens.weight": rows}
    load_head(published(tmp_path, tensors, llama_settings(bias=True)), target)
    with pytest.raises(ModelLoadError, match="is not the target's embedding"):
        load_head(published(tmp_path, tensors | {"embed_tokens.weight": 2.0 * rows}, llama_settings(bias=True)), target)


@pytest.mark.parametrize("layout", ["authors", "specforge", "specforge, inputs", "speculators", "whole vocabulary"])
def test_eagle3_as_published(layout: str, target: PreTrainedModel, tmp_path: Path) -> None:
    head = shaken("eagle3-normed-residual" if layout in ("speculators", "whole vocabulary") else "eagle3", target)
    tensors = renamed(dict(head.state_dict()), layers_0_="midlayer.")
    config = llama_settings(draft_vocab_size=40)
    if layout in ("specforge", "specforge, inputs"):
        ids = [1, 2, 2] if layout == "specforge" else [2, 3, 3]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
        config["rope_scaling"] = None
    if layout == "speculators":
        tensors = dict(head.state_dict())
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": llama_settings(), "draft_vocab_size": VOCABULARY}
        config["eagle_aux_hidden_state_layer_ids"] = [3, 0, 2]  # read in the order of the layers
    if layout == "whole vocabulary":
        tensors = {"model." + k if k != "lm_head.weight" else k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
        config["norm_before_residual"] = True
    again: Any = load_head(published(tmp_path, tensors, config), target)
    depths = {"specforge": (2, 3, 3), "specforge, inputs": (2, 3, 3), "speculators": (0, 2, 3)}.get(layout, (1, 2, 3))
    assert again.options.depths == depths and again.hidden_state_names == tuple(f"layer:{i}" for i in depths)
    assert again.options.norm_before_residual == (layout in ("speculators", "whole vocabulary"))
    assert torch.equal(again.lm_head.weight, head.lm_head.weight)
    assert torch.equal(again.draft_ids, head.draft_ids)


def test_our_eagle3_is_written_as_speculators(target: PreTrainedModel, tmp_path: Path) -> None:
    save_head(shaken("eagle3", target), tmp_path, target, num_speculative_tokens=4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 40
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert config["transformer_layer_config"]["rope_theta"] == 10000.0
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "layers.0.hidden_norm.weight"} <= names


def test_an_eagle3_of_the_whole_vocabulary_is_written_without_maps(target: PreTrainedModel, tmp_path: Path) -> None:
    head = shaken("eagle3-normed-residual", target)
    save_head(head, tmp_path, target)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    again: Any = load_head(str(tmp_path), target)
    assert torch.equal(again.draft_ids, head.draft_ids) and torch.equal(again.t2d, head.t2d)


def test_clover2_as_published(target: PreTrainedModel, tmp_path: Path) -> None:
    head = shaken("clover2-own-rows", target)
    config = llama_settings(clover={"num_heads": 5, "num_layers": 9, "heads_coefficient": 1, "decay_coefficient": 0.7})
    tensors = head.state_dict() | {"lm_head.weight": target.get_output_embeddings().weight}
    again: Any = load_head(published(tmp_path, tensors, config), target)
    assert len(again.layers) == 2 and again.options.own_rows
    assert torch.equal(again.clover_head_mlp2.weight, head.clover_head_mlp2.weight)


def medusa_tensors(head: Any) -> dict[str, Tensor]:
    tensors = {}
    for i, (block, output) in enumerate(zip(head.blocks, head.outputs, strict=True)):
        for j, layer in enumerate(block):
            tensors |= {f"{i}.{j}.linear.weight": layer.linear.weight, f"{i}.{j}.linear.bias": layer.linear.bias}
        tensors[f"{i}.{len(block)}.weight"] = output.weight
    return tensors


def test_medusa_is_converted_and_loaded(target: PreTrainedModel, tmp_path: Path) -> None:
    """The configuration claims two heads, as the published ones do; there are three."""
    head = shaken("medusa-own-output", target)
    source = tmp_path / "source"
    source.mkdir()
    torch.save(medusa_tensors(head), source / "medusa_lm_head.pt")
    (source / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}))
    with pytest.raises(ModelLoadError, match=r"only pickled weights \(medusa_lm_head.pt\); run `echelon convert"):
        load_head(str(source), target)
    convert(source, tmp_path / "head")
    again: Any = load_head(str(tmp_path / "head"), target)
    assert again.max_depth == 3 and again.options == head.options
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values(), strict=True))


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return print, ("boom",)


@pytest.mark.parametrize("state", [{"0.0.linear.weight": Bomb()}, {"step": 3}])
def test_what_is_no_tensor_is_not_converted(state: dict[str, Any], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"medusa_lm_head.pt cannot be read as plain tensors"):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_convert_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds neither medusa_lm_head.pt nor pytorch_model.bin"):
        convert(tmp_path, tmp_path / "out")
    torch.save({}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelLoadError, match=r"holds no config.json"):
        convert(tmp_path, tmp_path / "out")


# ---- refusals


def broken(target: PreTrainedModel, folder: Path, kind: str, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> str:
    """A saved head with something changed."""
    save_head(shaken(kind, target), folder, target)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    return published(folder, tensors, config)


REFUSALS: list[tuple[str, Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = [
    ("eagle", lambda t, _: t.pop("layers.0.mlp.up_proj.weight"), "eagle head .* lacks tensors: layers.0.mlp.up_proj.weight"),
    ("eagle", lambda t, _: t.update(odd=torch.zeros(1)), "has surplus tensors: odd"),
    ("eagle", lambda t, _: t.update({"fc.bias": torch.zeros(3)}), r"tensor fc.bias .* has shape \[3\]; .* ask for \[64\]"),
    ("eagle", lambda _, c: c.update(hidden_size=128), "has hidden size 128 and the target 64"),
    ("eagle", lambda _, c: c.update(vocab_size=100), "has vocabulary 100 and the target 96"),
    ("eagle", lambda _, c: c.pop("num_attention_heads"), "does not say num_attention_heads"),
    ("eagle", lambda t, _: t.update({"embed_tokens.weight": torch.ones(VOCABULARY, HIDDEN)}), "is not the target's embedding"),
    ("eagle", lambda t, _: [t.pop(k) for k in list(t) if k.startswith("fc")], "is no head that is known"),
    ("eagle3", lambda t, _: t.pop("lm_head.weight"), "lacks tensors: lm_head.weight"),
    ("eagle3", lambda t, _: t.pop("d2t"), "lacks tensors: d2t; its output layer has 40 tokens"),
    ("eagle3", lambda t, _: t["d2t"].fill_(200), "d2t and t2d .* contradict each other"),
    ("eagle3", lambda t, _: t["t2d"].fill_(True), "d2t and t2d .* contradict each other"),
    ("eagle3", lambda _, c: c.update(fc_norm=True), "sets fc_norm = True"),
    ("eagle3", lambda _, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), r"inputs of layers \[1, 2, 9\]; it needs three of the"),
    ("eagle3", lambda _, c: c.update(speculators_model_type="dflash"), "a speculators head of kind 'dflash'"),
    ("medusa", lambda _, c: c.update(echelon_head="hydra"), "holds a head 'hydra'; known: medusa"),
    ("medusa", lambda _, c: c["options"].update(width=2), "sets width, which medusa does not know"),
    ("clover2", lambda t, _: t.pop("clover_norm.weight"), "clover2 head .* lacks tensors: clover_norm.weight"),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSALS)
def test_what_does_not_fit_is_named(kind: str, change: Any, message: str, target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_head(broken(target, tmp_path, kind, change), target)


def test_folders_that_hold_no_head(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_head(str(tmp_path / "nowhere"), target)
    with pytest.raises(ModelLoadError, match=r"config.json cannot be read"):
        load_head(str(tmp_path), target)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="holds no settings"):
        load_head(str(tmp_path), target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="holds no weights"):
        load_head(str(tmp_path), target)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelLoadError, match="is torn"):
        load_head(str(tmp_path), target)


def test_heads_that_cannot_be_built(target: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="there is no head 'hydra'; known: medusa, clover"):
        build_head("hydra", target)
    with pytest.raises(ConfigError, match="medusa knows the options num_heads"):
        build_head("medusa", target, width=3)
    with pytest.raises(ConfigError, match="attention decoder reads the token"):
        build_head("clover", target, regressive=False)
    config = head_config(target.config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="rope_type 'dynamic'"):
        prepare(config)
    assert issubclass(head_class("clover"), CloverHead)
