"""A caller's model under `echelon.hf`: never changed, prepared once, and served as it is now."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import toys
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, MixtralConfig, MixtralForCausalLM

import echelon.hf
from echelon.hf import prepared
from echelon.model.load import loading

IDS = torch.tensor([p[:8] for p in toys.prompts((8, 8))])
OPTIONS = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


def speculated(model: Any, **changes: Any) -> torch.Tensor:
    return echelon.hf.generate(model, IDS, speculative_config=NGRAM, **(OPTIONS | changes))


def state_of(model: Any) -> list[Any]:
    """All that a caller could see of a model's modules."""
    return [(type(m), dict(vars(m)), dict(m._parameters), dict(m._buffers), dict(m._modules)) for m in model.modules()]


def is_same(before: list[Any], after: list[Any]) -> bool:
    same = [
        a[0] is b[0] and all(x.keys() == y.keys() and all(x[k] is y[k] for k in x) for x, y in zip(a[1:], b[1:], strict=True))
        for a, b in zip(before, after, strict=True)
    ]
    return all(same)


class Peeks(LogitsProcessor):
    """Uses the caller's model in the middle of a call, and may fail then."""

    is_pure = True

    def __init__(self, model: Any, wanted: torch.Tensor, fails: bool) -> None:
        self.model, self.wanted, self.fails, self.seen = model, wanted, fails, list[bool]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.equal(self.model(IDS).logits, self.wanted))
        if self.fails:
            raise RuntimeError("on purpose")
        return scores


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_callers_model_is_never_changed_not_even_during_a_call(kind: str, fails: bool) -> None:
    config = MixtralConfig(**(toys.llama().config.to_dict() | {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}))
    model = toys.llama(spread=0.25) if kind == "llama" else toys.randomised(MixtralForCausalLM, config, 2, 0.2)
    with torch.no_grad():
        wanted, text = model(IDS).logits, model.generate(IDS, **OPTIONS)
    before, attention = state_of(model), model.config._attn_implementation
    peeks = Peeks(model, wanted, fails)
    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        speculated(model, logits_processor=LogitsProcessorList([peeks]))
    assert peeks.seen and all(peeks.seen)
    assert is_same(before, state_of(model)) and model.config._attn_implementation == attention
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, wanted) and torch.equal(model.generate(IDS, **OPTIONS), text)


def test_threads_on_one_model_give_its_text_and_leave_it_as_it_was() -> None:
    """Two that speculate, one on the assistant that another drafts with, and one that calls the model itself."""
    model, other = toys.llama(spread=0.25), toys.llama(seed=3, spread=0.25)
    wanted = {id(m): m.generate(IDS, **OPTIONS) for m in (model, other)}
    found: list[bool] = []
    calls: list[tuple[Any, Callable[[], torch.Tensor]]] = [
        (model, lambda: speculated(model)),
        (model, lambda: echelon.hf.generate(model, IDS, assistant_model=other, **OPTIONS)),
        (other, lambda: echelon.hf.generate(other, IDS, assistant_model=model, **OPTIONS)),
        (model, lambda: model.generate(IDS, **OPTIONS)),
    ]
    barrier = threading.Barrier(len(calls))

    def work(owner: Any, call: Callable[[], torch.Tensor]) -> None:
        barrier.wait()
        found.extend(torch.equal(call(), wanted[id(owner)]) for _ in range(3))

    threads = [threading.Thread(target=work, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3 * len(calls)
    assert torch.equal(model.generate(IDS, **OPTIONS), wanted[id(model)])


def test_a_call_inside_a_call_on_the_same_model() -> None:
    model = toys.llama(spread=0.25)
    wanted = speculated(model)

    class Nested(LogitsProcessor):
        is_pure = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert torch.equal(speculated(model, max_new_tokens=2), wanted[:, :10])
            return scores

    assert torch.equal(speculated(model, logits_processor=LogitsProcessorList([Nested()])), wanted)


def test_a_model_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"self_test": 0, "patch_model": 0}
    for name in counts:
        whole = getattr(loading, name)

        def counted(*args: Any, name: str = name, whole: Any = whole, **kwargs: Any) -> Any:
            counts[name] += 1
            return whole(*args, **kwargs)

        monkeypatch.setattr(loading, name, counted)
    model, draft = toys.llama(spread=0.25), toys.llama(seed=1, spread=0.25)
    for _ in range(3):
        echelon.hf.generate(model, IDS, assistant_model=draft, **OPTIONS)
        model.generate(IDS, **OPTIONS)
    assert counts == {"self_test": 2, "patch_model": 2}


def _layer(model: Any) -> Any:
    return model.model.layers[0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: _layer(m).mlp.up_proj.weight.detach().mul_(-1),
    "one element, past autograd": lambda m: _layer(m).mlp.up_proj.weight.data[3, 5].fill_(9.0),
    "one row of the embedding": lambda m: m.model.embed_tokens.weight.data[int(IDS[0, -1])].mul_(-1),
    "a tensor's data": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.flip(0)),
    "a parameter": lambda m: setattr(
        _layer(m).self_attn.q_proj, "weight", nn.Parameter(_layer(m).self_attn.k_proj.weight.data.repeat(2, 1))
    ),
    "a module": lambda m: setattr(_layer(m).mlp, "act_fn", nn.ReLU().eval()),
    "an attribute": lambda m: setattr(_layer(m).input_layernorm, "variance_epsilon", 3.0),
    "a state": lambda m: m.load_state_dict(toys.llama(seed=7, spread=0.25).state_dict()),
    "the rotary frequencies": lambda m: m.model.rotary_emb.inv_freq.mul_(0.3),
    "a hook": lambda m: _layer(m).mlp.register_forward_hook(lambda _m, _i, out: out * 2),
    "a hook of a linear layer": lambda m: _layer(m).mlp.up_proj.register_forward_hook(lambda _m, _i, out: out * 2),
    "the dtype": lambda m: m.bfloat16().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_served_is_the_model_as_it_is_now(change: str) -> None:
    model = toys.llama(spread=0.25)
    before = speculated(model)
    with torch.no_grad():
        CHANGES[change](model)
    after = model.generate(IDS, **OPTIONS)
    assert torch.equal(speculated(model), after)
    assert torch.equal(speculated(model), after)
    assert change in ("one element, past autograd", "the dtype") or not torch.equal(before, after), "the change shows"


def test_hooks_see_the_callers_own_modules() -> None:
    model = toys.llama(spread=0.25)
    seen: set[Any] = set()
    handles = [m.register_forward_hook(lambda module, *_: seen.add(module)) for m in (_layer(model), _layer(model).mlp.up_proj)]
    speculated(model)
    assert seen == {_layer(model), _layer(model).mlp.up_proj}
    for handle in handles:
        handle.remove()


def hang(model: Any) -> None:
    """A hook that holds the model."""
    model.model.register_forward_hook(lambda *_: model and None)


@pytest.mark.parametrize("with_hook", [False, True])
def test_what_was_prepared_goes_with_the_model(with_hook: bool) -> None:
    model, draft = toys.llama(spread=0.25), toys.llama(seed=1)
    if with_hook:
        hang(model)
    echelon.hf.generate(model, IDS, assistant_model=draft, **OPTIONS)
    copied = None if with_hook else weakref.ref(prepared._kept[model].loaded.model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and (copied is None or copied() is None)


def test_release_frees_what_is_kept() -> None:
    model = toys.llama(spread=0.25)
    text = speculated(model)
    copied = weakref.ref(prepared._kept[model].loaded.model)
    echelon.hf.release(model)
    gc.collect()
    assert copied() is None
    assert torch.equal(speculated(model), text)


def test_the_copy_shares_what_is_not_packed() -> None:
    model = toys.llama(spread=0.25)
    speculated(model)
    ours, theirs = (dict(m.named_parameters()) for m in (prepared._kept[model].loaded.model, model))
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in theirs)
