"""What a module computes is recognised over all values that may come, and a model is judged as it will be served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
import transformers as tr
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.pytorch_utils import Conv1D

from echelon import LLM, SamplingParams, UnsupportedModelError
from echelon.model.load import selftest, servedtest
from echelon.model.load.selftest import shrunken
from echelon.model.patches import linear as layers
from echelon.model.patches import trials
from echelon.model.patches.elementwise import _Finder, patch_elementwise
from echelon.ops import cpu
from echelon.ops.compiled import is_built
from echelon.ops.contract import Activation

pytestmark = pytest.mark.skipif(not is_built(), reason="the compiled kernels are not built")
CPU = torch.device("cpu")
TANH = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate")
OURS = {"silu": "SILU", "swish": "SILU", "gelu": "GELU", "gelu_python": "GELU"} | dict.fromkeys(TANH, "GELU_TANH")
ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_an_activation_is_taken_for_what_it_is_over_the_whole_range(name: str, dtype: torch.dtype) -> None:
    function = ACT2FN[name]
    function = function.to(dtype) if isinstance(function, nn.Module) else function
    kind = trials.activation_of(function, CPU)
    assert (kind.name if kind is not None else None) == OURS.get(name)
    if kind is not None:
        x = torch.linspace(-300, 300, 9601).to(dtype)[None]
        difference = (function(x.float()).double() - cpu.activate(x, kind).double()).abs()
        assert bool((difference <= ROUNDING[dtype] * (x.double().abs() + 1)).all())


class Clipped(LlamaMLP):
    """Clamps what only large inputs reach; `up` too, which no trial of the activation alone would see."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=300.0), self.up_proj(x).clamp(-2000.0, 2000.0)
        return self.down_proj(self.act_fn(gate) * up)


def mlps(dtype: torch.dtype) -> dict[str, nn.Module]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "hidden_act": "silu", "mlp_bias": False}
    config: Any = SimpleNamespace(**sizes, swiglu_limit=10.0)
    return {c.__name__: c(config).to(dtype) for c in (LlamaMLP, DeepseekV4MLP, Glm5NextTextMLP, Clipped)}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_clamped_mlp_is_not_taken_for_a_plain_one(dtype: torch.dtype) -> None:
    with torch.no_grad():
        assert {name for name, mlp in mlps(dtype).items() if _Finder(dtype, CPU)._gated_mlp(mlp)} == {"LlamaMLP"}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_10", "quick_gelu"])
def test_an_mlp_is_served_as_near_to_the_truth_as_the_framework(act: str, dtype: torch.dtype) -> None:
    plain, served = (toys.llama(spread=0.4, hidden_act=act).to(dtype) for _ in range(2))
    patch_elementwise(served)
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        found = [m.model.layers[0].mlp(x).double() for m in (plain, served)]
        truth = plain.model.layers[0].mlp.double()(x.double())
    theirs, ours = (float((out - truth).abs().max()) for out in found)
    assert ours <= 1.2 * theirs + 1e-5


def test_a_model_is_judged_as_it_will_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were an activation taken for another after all, the served twin would show it; so in 16 bits."""
    config = toys.llama(hidden_act="gelu_10").config
    make = lambda: selftest._twin(tr.LlamaForCausalLM, shrunken(config))  # noqa: E731
    servedtest.check_served(make, list(range(3, 27)))
    monkeypatch.setattr(trials, "activation_of", lambda *_: Activation.GELU)
    monkeypatch.setattr(trials, "is_gated_mlp", lambda *_: True)
    with pytest.raises(UnsupportedModelError, match="other logits where large values meet its activations"):
        servedtest.check_served(make, list(range(3, 27)))
    monkeypatch.setattr(trials, "activation_of", lambda *_: Activation.SILU)
    with pytest.raises(UnsupportedModelError, match="times the rounding error"):
        servedtest.check_rounding(make, list(range(3, 27)), torch.bfloat16)


# ---- linear layers with a forward of their own


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class DoubledConv(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * (x @ self.weight) + self.bias


class Ternary(nn.Linear):
    """As BitNet's online quantisation."""

    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight.abs().mean()
        return F.linear(input, (self.weight / scale).round().clamp(-1, 1) * scale, self.bias)


class OverTheCall(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input / input.abs().max())


def with_layer(cls: type[nn.Module]) -> Any:
    model: Any = toys.llama()
    odd = cls(96, 64) if issubclass(cls, nn.Linear) else cls(64, 96)  # type: ignore[call-arg]
    with torch.no_grad():
        odd.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(7))  # type: ignore[operator, union-attr]
        odd.bias.zero_()  # type: ignore[operator, union-attr]
    model.model.layers[1].mlp.down_proj = odd
    return model


def test_a_linear_subclass_is_served_as_it_is() -> None:
    model = with_layer(Doubled)
    prompts = toys.prompts((5, 17, 40))
    llm = LLM(toys.adopted(model), {"method": "ngram", "num_speculative_tokens": 5}, max_num_seqs=4)
    got = [o.outputs[0].token_ids for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))]
    for prompt, row in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert out[0, len(prompt) :].tolist() == row


@pytest.mark.parametrize("cls", [DoubledConv, Ternary, OverTheCall])
def test_a_linear_subclass_that_rounds_by_the_call_is_refused_by_name(cls: type[nn.Module]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{cls.__name__} .*a linear layer with a forward of its own"):
        toys.adopted(with_layer(cls))


def test_a_linear_layer_with_a_patched_forward_is_refused() -> None:
    model: Any = toys.llama()
    model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight) * 2
    with pytest.raises(UnsupportedModelError, match="forward of its own already"):
        toys.adopted(model)


# ---- routers and experts that keep their own forward

MIXTURES = {
    "AriaText": {"moe_num_experts": 8, "moe_topk": 2},
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24},
    "ExaoneMoe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Glm4Moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "HYV3": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "JetMoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "MiniMaxM2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_log_probabilities_of_a_mixture_do_not_depend_on_neighbours(name: str) -> None:
    kind = getattr(tr, f"{name}Config")
    config = shrunken(kind())
    for key, value in (MIXTURES[name] | {"max_position_embeddings": 160, "num_hidden_layers": 3}).items():
        setattr(config, key, value)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * 3)[:3]
    loaded = toys.adopted(toys.randomised(getattr(tr, f"{name}ForCausalLM"), config, 0, 0.25))
    assert layers.framework_layers(loaded.model) == []
    llm = LLM(loaded, max_num_seqs=8, kv_cache_memory_bytes=1 << 24)
    prompts, params = toys.prompts((40, 7, 100, 33, 3), vocabulary=60), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    alone = [llm.generate([p], params)[0].prompt_logprobs for p in prompts]
    assert [o.prompt_logprobs for o in llm.generate(prompts, params)] == alone


class OwnProduct(nn.Module):
    """A matrix that no linear layer uses."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mixing = inner, nn.Parameter(torch.eye(64) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.mixing


class Mixed(tr.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].mlp = OwnProduct(self.model.layers[0].mlp)


class Counting(tr.LlamaForCausalLM):
    """Writes to a buffer in every pass."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("passes", torch.zeros(1), persistent=False)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self.passes += 1
        return super().forward(*args, **keywords)


@pytest.mark.parametrize(
    ("cls", "reason"), [(Mixed, "multiplies matrices by the framework in OwnProduct"), (Counting, "changes passes in")]
)
def test_what_stays_with_the_framework_is_refused_by_name(cls: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        toys.adopted(toys.randomised(cls, toys.llama().config, 0, 0.3))


# ---- what has matrices or norms that are like no other's


class L2Norm(nn.Module):
    """Has an epsilon and no weight, and is no norm by the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + self.eps).type_as(x)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_norms_without_a_weight_are_served(dtype: torch.dtype) -> None:
    finder = _Finder(dtype, CPU)
    for norm in (NanoChatRMSNorm(1e-5), Gemma4RMSNorm(48, with_scale=False)):
        ours = finder._norm(norm)
        assert ours is not None, type(norm)
        x = torch.randn(3, 2, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
        torch.testing.assert_close(ours(x), norm(x))
    assert finder._norm(L2Norm()) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_matrix_that_is_no_linear_layers_keeps_its_values_in_another_dtype(dtype: torch.dtype) -> None:
    """As norms of heads in Command R+, whose weight is a number for every head and place."""
    config = tr.CohereConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, use_qk_norm=True, pad_token_id=0
    )
    model = toys.randomised(tr.CohereForCausalLM, config, 0, 0.3).to(dtype)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain = LLM(toys.adopted(model), max_num_seqs=2).generate([[5, 6, 7, 8], [9]], params)
    drafted = LLM(toys.adopted(model), {"method": "ngram", "num_speculative_tokens": 3}, max_num_seqs=2).generate(
        [[5, 6, 7, 8], [9]], params
    )
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in drafted]
    assert [len(o.outputs[0].token_ids) for o in plain] == [8, 8]
