"""What a plan on paper says each device holds is what the shards of a real model hold, and what it says they gather they gather."""

from __future__ import annotations

import copy
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from decoders import decoders
from torch import Tensor, nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from echelon import ConfigError
from echelon.estimate.devices import Device
from echelon.estimate.layout import Held, ModelParts, Pass, model_parts, split_among, stage_layers
from echelon.estimate.shapes import PaperModel
from echelon.memory.plan import LOGIT_BYTES
from echelon.model.attention import IMPLEMENTATION, RecordingAttention, run_one_token
from echelon.model.load.loading import load_share
from echelon.model.patches.linear import packed_weights
from echelon.model.patches.split import Parts, Share, cut_model

WIDE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3}
KINDS = ("llama", "qwen2", "qwen3", "mistral", "opt", "mixtral")


class NotedExchange:
    """Stands for the way between ranks: what others give is zero, and bytes of what is brought together are noted."""

    inside = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.is_connected = rank, size, False
        self.whole, self.own = [0, 0], [0, 0]  # of gathers for all, and for rank 0

    def gathered(self, own: Tensor, parts: Parts, for_first: int = 0) -> Tensor:
        part = parts[self.rank]
        whole = own.new_zeros(*own.shape[:-1], part.whole)
        whole[..., part.first : part.first + own.shape[-1]] = own
        self.whole[for_first] += whole.nbytes
        self.own[for_first] += own.nbytes
        return whole

    def gathered_by_first(self, own: Tensor, parts: Parts) -> Tensor:
        return self.gathered(own, parts, 1)


def toy(kind: str) -> PreTrainedModel:
    if kind == "wide llama":
        return toys.llama(**WIDE, intermediate_size=160, head_dim=16)
    cls, config = decoders(8, 16)[kind]
    return toys.randomised(cls, config, 0, 0.3)


def on_paper(model: PreTrainedModel) -> PaperModel:
    with torch.device("meta"):
        other = type(model)(copy.deepcopy(model.config)).to(torch.bfloat16)
    other.set_attn_implementation(IMPLEMENTATION)
    return PaperModel(other.eval(), model.dtype)


def all_of(parts: ModelParts) -> Held:
    return reduce(Held.__add__, parts.layers, parts.before + parts.after)


def output_numbers(model: Any) -> int:
    """Of an output layer that embeddings do not share."""
    output = model.get_output_embeddings()
    return 0 if output.weight is model.get_input_embeddings().weight else output.weight.numel()


@pytest.mark.parametrize("kind", [*KINDS, "wide llama"])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_ranks_hold_what_their_shards_hold(kind: str, size: int) -> None:
    model = toy(kind)
    found = model_parts(on_paper(model), size)
    for rank, parts in enumerate(found):
        shard = copy.deepcopy(model)
        if size > 1:
            cut_model(shard, Share(NotedExchange(rank, size)))
        held = sum({id(p): p.numel() for p in shard.parameters()}.values()) - output_numbers(model)
        untied = output_numbers(model) > 0
        output = parts.after.matrices // model.config.hidden_size * model.config.hidden_size if untied and rank else output_numbers(model)
        assert all_of(parts).numbers - output == held, rank
    assert sum(parts.after.matrices for parts in found) == model.get_output_embeddings().weight.numel(), "each tile once"


@pytest.mark.parametrize("kind", ["llama", "opt", "mixtral"])
def test_served_shards_hold_and_gather_what_is_planned(kind: str, tmp_path: Path) -> None:
    """Shares as workers load them, and a pass over one token, of which every gather is noted."""
    model = toy(kind)
    model.save_pretrained(tmp_path)
    found = model_parts(on_paper(model), 2)
    for rank, parts in enumerate(found):
        exchange = NotedExchange(rank, 2)
        loaded = load_share(str(tmp_path), Share(exchange), "auto", None)
        planned_matrices = all_of(parts)
        multiplied = sum(w.columns * w.depth for w in packed_weights(loaded.model))
        whole = model.get_output_embeddings().weight.numel() if rank == 0 or not output_numbers(model) else 0
        of_output = whole + (parts.after.matrices if rank else 0)  # a rank's tiles of a shared one are looked at where they lie
        own = planned_matrices.matrices + planned_matrices.experts - parts.after.matrices
        assert multiplied == own + of_output + router_numbers(loaded.model), rank
        exchange.is_connected, exchange.whole, exchange.own = True, [0, 0], [0, 0]
        run_one_token(loaded.model, RecordingAttention())
        for for_first in (False, True):
            gathers = [g for g in planned_matrices.gathers if g.for_first == for_first]
            assert exchange.whole[for_first] == sum(g.columns * g.bytes_each for g in gathers) > 0
            assert exchange.own[for_first] == sum(g.own * g.bytes_each for g in gathers)


def router_numbers(model: Any) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if name.endswith("mlp.gate.weight"))


def test_keys_and_values_of_a_rank() -> None:
    planned = on_paper(toy("wide llama"))  # 2 heads of keys and values
    for size, heads in ((1, 2), (2, 1), (6, 1)):
        for parts in model_parts(planned, size):
            assert all_of(parts).kv_bytes == 3 * heads * 2 * 16 * 4
    assert all_of(model_parts(planned, 2, is_rounded=True)[0]).kv_bytes == 3 * 1 * (2 * 16 + 2 * 4)


def test_no_token_goes_through_what_sees_pictures() -> None:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = size | {"vocab_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16}
    sight = size | {"num_hidden_layers": 3, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4)
    model: Any = Gemma3ForConditionalGeneration._from_config(config, attn_implementation=IMPLEMENTATION).eval()
    found = all_of(model_parts(on_paper(model))[0])
    of_text = sum(m.weight.numel() for m in model.get_decoder().modules() if isinstance(m, nn.Linear))
    assert found.matrices == of_text + model.get_output_embeddings().weight.numel()
    assert found.numbers == sum(p.numel() for p in model.parameters())


def test_stages_have_every_layer_once_and_the_first_what_is_around_them() -> None:
    assert stage_layers(10, 4) == [range(2), range(2, 5), range(5, 7), range(7, 10)]
    planned = on_paper(toy("wide llama"))
    whole = all_of(model_parts(planned)[0])
    stages = split_among(planned, 1, 3)
    assert sum(part.numbers for (part,) in stages) == whole.numbers == sum(p.numel() for p in planned.model.parameters())
    assert [part.held.layers for (part,) in stages] == [1, 1, 1]
    assert [part.output.numbers > 0 for (part,) in stages] == [True, False, False]
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 4 is not between 1 and the model's 3 layers"):
        split_among(planned, 1, 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 4 does not divide the 6 attention heads"):
        split_among(planned, 4, 1)


def test_gathers_of_a_layer_by_hand() -> None:
    """Input and output of both projections back, in 4 bytes, and logits in float32 for rank 0."""
    planned = on_paper(toy("wide llama"))
    first, second = (all_of(parts) for parts in model_parts(planned, 2))
    per_layer = 96 + 96 + 160 + 96
    assert sum(g.columns for g in first.gathers if not g.for_first) == 3 * per_layer
    assert [g.bytes_each for g in first.gathers if g.for_first] == [LOGIT_BYTES]
    logits = [g.received(rank) for rank, held in enumerate((first, second)) for g in held.gathers if g.for_first]
    assert logits == [(96 - first.gathers[-1].own) * LOGIT_BYTES, 0]


def test_mixtures_touch_more_experts_the_more_tokens_there_are() -> None:
    held = Held(experts=800, chosen=0.25)
    device = Device(memory_gb=1.0, read_gb=1e-9, tflops={"float32": 1e3}, link_gb=1.0, source="a byte a second")
    one, many = (held.seconds(device, "float32", 4, Pass(rows, 1, 0))["experts"] for rows in (1, 64))
    assert one == pytest.approx(0.25 * 3200)
    assert 3199 < many <= 3200
