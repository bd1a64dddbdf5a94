"""The two doors for users of `transformers`: the same tensor as `generate`, and the caller's model untouched."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from transformers import LogitsProcessor, LogitsProcessorList, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

import echelon.hf
from echelon import ConfigError, EchelonError, RequestError
from echelon.ops import compiled

LENGTHS = (3, 17, 9, 1, 30)
PAD = 0


def padded(side: str = "left") -> dict[str, torch.Tensor]:
    rows = [[(t % 90) + 2 for t in p] for p in toys.prompts(LENGTHS)]
    width = max(LENGTHS)
    fill = [[PAD] * (width - len(r)) for r in rows]
    ids = [f + r if side == "left" else r + f for f, r in zip(fill, rows, strict=True)]
    mask = [[0] * len(f) + [1] * len(r) if side == "left" else [1] * len(r) + [0] * len(f) for f, r in zip(fill, rows, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def pair() -> tuple[Any, Any]:
    model = toys.llama(spread=0.25, pad_token_id=PAD)
    return model, toys.noisy_copy(model, 0.05)


class Stutter(LogitsProcessor):
    """Depends on the whole row: forbids the last token."""

    is_pure = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -float("inf"))


class StopAtMultiple(StoppingCriteria):
    is_pure = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] % 13 == 0


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eos": {"eos_token_id": list(range(20, 96, 7))},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "processor": {"logits_processor": LogitsProcessorList([Stutter()])},
    "criteria": {"stopping_criteria": StoppingCriteriaList([StopAtMultiple(), MaxTimeCriteria(1000.0)])},
    "min_new_tokens": {"eos_token_id": list(range(0, 96, 3)), "min_new_tokens": 9},
    "bad_words": {"bad_words_ids": [[5], [7, 8], [30], [41]]},
    "max_length": {"max_length": 41, "max_new_tokens": None},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("door", ["function", "method"])
def test_greedy_equals_generate(case: str, door: str) -> None:
    model, draft = pair()
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD} | CASES[case]
    expected = model.generate(**padded(), **options)
    if door == "function":
        got = echelon.hf.generate(model, **padded(), assistant_model=draft, **options)
    else:
        got = model.generate(**padded(), custom_generate=echelon.hf.speculate(assistant_model=draft), **options)
    assert torch.equal(expected, got)


def test_ngram_and_the_dictionary_result() -> None:
    model, _ = pair()
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD, "return_dict_in_generate": True}
    expected = model.generate(**padded(), **options)
    got = echelon.hf.generate(model, **padded(), speculative_config={"method": "ngram", "num_speculative_tokens": 5}, **options)
    assert type(got) is type(expected)
    assert torch.equal(expected.sequences, got.sequences)


def test_the_model_is_left_as_it_was() -> None:
    model, draft = pair()
    before = [copy.deepcopy(m.state_dict()) for m in (model, draft)]
    kinds = [m.config._attn_implementation for m in (model, draft)]
    ids = padded()["input_ids"]
    with torch.inference_mode():
        logits = model(ids).logits
    echelon.hf.generate(model, **padded(), assistant_model=draft, max_new_tokens=5, do_sample=False)
    for m, state, kind in zip((model, draft), before, kinds, strict=True):
        assert m.config._attn_implementation == kind
        assert all(torch.equal(a, b) for a, b in zip(m.state_dict().values(), state.values(), strict=True))
        assert not any("forward" in vars(x) for x in m.modules())
        assert all(p.requires_grad for p in m.parameters())
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, logits)


def test_the_model_is_left_as_it_was_after_a_failure() -> None:
    model, draft = pair()

    class Fails(LogitsProcessor):
        is_pure = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose") as raised:
        echelon.hf.generate(model, **padded(), assistant_model=draft, max_new_tokens=5, logits_processor=LogitsProcessorList([Fails()]))
    assert raised.value.__notes__[0].startswith("raised in test_hf.py")
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in vars(x) for x in (*model.modules(), *draft.modules()))


def test_several_samples_a_prompt_differ_and_follow_the_seed() -> None:
    model, draft = pair()
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "num_return_sequences": 3, "pad_token_id": PAD}
    torch.manual_seed(3)
    first = echelon.hf.generate(model, **padded(), assistant_model=draft, **options)
    torch.manual_seed(3)
    again = echelon.hf.generate(model, **padded(), speculative_config={"method": "ngram", "num_speculative_tokens": 5}, **options)
    assert first.shape[0] == 3 * len(LENGTHS)
    assert torch.equal(first, again), "the drafter does not change what is sampled"
    assert len({tuple(row) for row in first.tolist()}) > len(LENGTHS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"num_beams": 3}, "num_beams"),
        ({"streamer": object()}, "streamer"),
        ({"max_new_tokens": 500}, "context of 128"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    model, draft = pair()
    with pytest.raises(EchelonError, match=message):
        echelon.hf.generate(model, **padded(), assistant_model=draft, **({"max_new_tokens": 5} | options))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"speculative_config": {"model": "self:int4"}}, "a model in memory has none"),
        ({"assistant_model": "draft", "speculative_config": {"model": "another"}}, "name two drafters"),
        ({"assistant_model": "draft", "speculative_config": {"method": "ngram"}}, "name two drafters"),
    ],
)
def test_drafters_that_contradict_each_other_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        echelon.hf.generate(pair()[0], **padded(), max_new_tokens=5, **how)


@pytest.mark.skipif(not compiled.is_built(), reason="integers need the compiled kernels")
def test_a_draft_model_by_name_is_read_in_integers(tmp_path: Path) -> None:
    model, draft = pair()
    draft.save_pretrained(tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**padded(), **options)
    for quantization in ("int8", None):
        drafts = {"model": str(tmp_path), "quantization": quantization, "num_speculative_tokens": 2}
        assert torch.equal(echelon.hf.generate(model, **padded(), speculative_config=drafts, **options), plain)


def test_training_mode_is_refused() -> None:
    model, draft = pair()
    with pytest.raises(ConfigError, match="eval"):
        echelon.hf.generate(model.train(), **padded(), assistant_model=draft, max_new_tokens=5)


def test_without_a_drafter_it_says_so() -> None:
    model, _ = pair()
    with pytest.warns(UserWarning, match="no drafter"):
        got = model.generate(**padded(), custom_generate=echelon.hf.speculate(), max_new_tokens=6, do_sample=False, pad_token_id=PAD)
    assert torch.equal(got, model.generate(**padded(), max_new_tokens=6, do_sample=False, pad_token_id=PAD))


def test_an_unknown_key_is_refused() -> None:
    model, _ = pair()
    with pytest.raises((ConfigError, RequestError), match="known keys"):
        echelon.hf.generate(model, **padded(), speculative_config={"method": "ngram", "k": 3}, max_new_tokens=5)
