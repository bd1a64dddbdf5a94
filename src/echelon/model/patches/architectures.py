"""Classes of models that are known by name: what runs as one function, and how they are split among ranks. A trial cannot see what a
layer would do with other data, nor where one ends that another process has.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3Model

from echelon.errors import UnsupportedModelError

COLUMNS, BACK = "colwise", "rowwise"  # as the plans of `transformers` call them; the latter is cut by columns here too
OPT_PLAN = {
    **{f"decoder.layers.*.self_attn.{name}_proj": COLUMNS for name in "qkv"},
    "decoder.layers.*.self_attn.out_proj": BACK,
    "decoder.layers.*.fc1": COLUMNS,
    "decoder.layers.*.fc2": BACK,
}


@dataclass(frozen=True)
class Architecture:
    """What a class of causal language models is made of.

    inner, layer, attention  classes of the model within, of its layers and their attention, where each of the first two can run as one
                             function; None: they cannot
    holder, norm             the module that holds the layers, and the name in it of the norm at their end
    positions                the name in it of what is added to embeddings; None: there is none
    plan                     how its linear layers are cut (`split.plan_of`); None: the configuration of `transformers` says it
    """

    inner: type | None = None
    layer: type | None = None
    attention: type | None = None
    holder: str = "model"
    norm: str = "norm"
    positions: str | None = None
    plan: dict[str, str] | None = None


ARCHITECTURES: dict[type, Architecture] = {
    LlamaForCausalLM: Architecture(LlamaModel, LlamaDecoderLayer, LlamaAttention),
    MistralForCausalLM: Architecture(MistralModel, MistralDecoderLayer, MistralAttention),
    Qwen2ForCausalLM: Architecture(Qwen2Model, Qwen2DecoderLayer, Qwen2Attention),
    Qwen3ForCausalLM: Architecture(Qwen3Model, Qwen3DecoderLayer, Qwen3Attention),
    MixtralForCausalLM: Architecture(),
    OPTForCausalLM: Architecture(holder="model.decoder", norm="final_layer_norm", positions="embed_positions", plan=OPT_PLAN),
}


def architecture_of(cls: type[PreTrainedModel], setting: str) -> Architecture:
    """What is known of a class of models that is to be split.

    Raises
    ------
    UnsupportedModelError  nothing; `setting` is what asks for it
    """
    if (found := ARCHITECTURES.get(cls)) is None:
        known = ", ".join(c.__name__ for c in ARCHITECTURES)
        raise UnsupportedModelError(f"{setting} above 1 serves {known}, not {cls.__name__}; leave it out")
    return found
