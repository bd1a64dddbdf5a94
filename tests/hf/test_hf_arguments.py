"""Every argument of `generate` and every field of `GenerationConfig` under `echelon.hf`: honoured, refused by name, or irrelevant."""

from __future__ import annotations

import functools
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from test_hf import padded, pair
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation import LogitsProcessor, MaxLengthCriteria, StoppingCriteria
from transformers.utils import TransformersKwargs

import echelon.hf
from echelon import ConfigError, EchelonError, RequestError, UnsupportedModelError
from echelon.hf import arguments

EOS = list(range(20, 96, 7))
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
DICT = {"return_dict_in_generate": True, "output_scores": True}

# what each honoured field is set to, with what it needs beside it; None: sampled, so only the first scores can be compared
FIELDS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 37, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 5},
    "min_length": {"min_length": 34, "eos_token_id": EOS},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": EOS},
    "max_time": {"max_time": 1e4},
    "stop_strings": {"stop_strings": [chr(i) for i in range(34, 127, 4)], "tokenizer": "toy"},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 8], [30], [41]]},
    "renormalize_logits": {"renormalize_logits": True},
    "forced_bos_token_id": {"forced_bos_token_id": 9, "input_ids": torch.tensor([[4], [5]]), "attention_mask": torch.ones(2, 1)},
    "forced_eos_token_id": {"forced_eos_token_id": 11},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": EOS},
    "suppress_tokens": {"suppress_tokens": list(range(0, 96, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 96, 2))},
    "sequence_bias": {"sequence_bias": [[[9], 8.0], [[12, 13], 30.0]]},
    "guidance_scale": {"guidance_scale": 1.7},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=9.0)},
    "output_scores": {},
    "output_logits": {"output_logits": True},
    "return_dict_in_generate": {},
    "pad_token_id": {"pad_token_id": 3, "eos_token_id": EOS},
    "bos_token_id": {"bos_token_id": 7, "input_ids": None, "attention_mask": None},
    "eos_token_id": {"eos_token_id": EOS},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 5},
    "max_matching_ngram_size": {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3},
    "num_assistant_tokens": {"num_assistant_tokens": 6},
    "do_sample": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 0.6},
    "top_k": {"do_sample": True, "top_k": 7},
    "top_p": {"do_sample": True, "top_p": 0.6},
    "min_p": {"do_sample": True, "min_p": 0.2},
    "top_h": {"do_sample": True, "top_h": 0.5},
    "typical_p": {"do_sample": True, "typical_p": 0.5},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 3e-2},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 3e-2},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 3},
}
REFUSED: dict[str, Any] = {
    "num_beams": 3,
    "num_beam_groups": 2,
    "constraints": ["x"],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "output_attentions": True,
    "output_hidden_states": True,
    "token_healing": True,
    "cache_implementation": "quantized",
    "cache_config": {"nbits": 4},
    "use_mtp": True,
    "assistant_early_exit": 1,
    "speculation_type": "dflash",
    "is_assistant": True,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.7,
    "synced_gpus": True,
    "custom_generate": "somewhere",
    "assistant_tokenizer": "toy",
    "trust_remote_code": True,
}
IRRELEVANT: dict[str, Any] = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "diversity_penalty": 0.5,
    "low_memory": True,
    "decoder_start_token_id": 3,
    "use_cache": False,
    "max_cache_len": 99,
    "prefill_chunk_size": 4,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": None,
    "transformers_version": "5.0.0",
    "_from_model_config": True,
}
UNSEEN = {  # honoured fields that are set so, or are made so, that the text stays
    *("max_time", "renormalize_logits", "remove_invalid_values", "output_scores", "output_logits", "return_dict_in_generate"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
}
NOTHING_DRAFTED = ("ignore:.*may keep state:UserWarning", "ignore:.*no drafter:UserWarning")
pytestmark = [pytest.mark.filterwarnings(line) for line in NOTHING_DRAFTED]


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """A character an id."""
    characters = {chr(i + 32): i for i in range(95)}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ")


def inputs(**changes: Any) -> dict[str, Any]:
    given = padded() | GREEDY | changes
    if given.get("tokenizer") == "toy":
        given["tokenizer"] = toy_tokenizer()
    return {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}


def test_every_argument_and_field_stands_in_one_table() -> None:
    handed_on = GenerationMixin._extract_generation_mode_kwargs(toys.llama(), None, {"tokenizer": 1, "assistant_tokenizer": 1}, True, 1, 1)
    names = {*inspect.signature(GenerationMixin.generate).parameters, *handed_on, "trust_remote_code"} - {"self"}
    assert names == arguments.HONOURED_ARGUMENTS | arguments.REFUSED_ARGUMENTS.keys()
    assert not arguments.HONOURED_ARGUMENTS & arguments.REFUSED_ARGUMENTS.keys()
    tables = [arguments.HONOURED_FIELDS, arguments.REFUSED_FIELDS.keys(), arguments.IRRELEVANT_FIELDS.keys()]
    assert set().union(*tables) == vars(GenerationConfig()).keys()
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert FIELDS.keys() == arguments.HONOURED_FIELDS
    assert REFUSED.keys() == arguments.REFUSED_FIELDS.keys() | arguments.REFUSED_ARGUMENTS.keys()
    assert IRRELEVANT.keys() == arguments.IRRELEVANT_FIELDS.keys()
    assert all(arguments.IRRELEVANT_FIELDS.values())


@pytest.mark.parametrize("name", FIELDS)
def test_every_honoured_field_gives_what_generate_gives(name: str) -> None:
    model, draft = pair()
    given = inputs(**DICT | FIELDS[name])
    own = {k: v for k, v in given.items() if k not in ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens")}
    how = {} if "prompt_lookup_num_tokens" in given else {"assistant_model": draft}
    expected, got = model.generate(**own), echelon.hf.generate(model, **given, **how)
    assert got.sequences.shape == expected.sequences.shape
    if given["do_sample"]:
        assert torch.allclose(got.scores[0], expected.scores[0], atol=1e-4)
        assert torch.isfinite(got.scores[0].gather(1, got.sequences[:, [-len(got.scores)]])).all()
    else:
        assert torch.equal(got.sequences, expected.sequences)
        assert name in UNSEEN or not torch.equal(got.sequences, model.generate(**inputs())), "the field shows"


@pytest.mark.parametrize("name", REFUSED)
def test_every_refused_name_is_refused(name: str) -> None:
    model, draft = pair()
    with pytest.raises(EchelonError, match=rf"{name}.* is not available with echelon.hf: \w+"):
        echelon.hf.generate(model, **inputs(), assistant_model=draft, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", arguments.REFUSED_FIELDS)
@pytest.mark.parametrize("owner", ["call", "model"])
def test_every_refused_field_of_a_configuration_is_refused(name: str, owner: str) -> None:
    """That of the call, or the model's own, which fields that are unset fall back to."""
    model, draft = pair()
    config = GenerationConfig(**GREEDY) if owner == "call" else model.generation_config
    setattr(config, name, REFUSED[name])
    own = GREEDY if owner == "model" else {"generation_config": config}
    with pytest.raises(EchelonError, match=rf"{name}.* is not available with echelon.hf: \w+"):
        echelon.hf.generate(model, **padded(), **own, assistant_model=draft)


@pytest.mark.parametrize("name", IRRELEVANT)
def test_every_irrelevant_field_changes_nothing(name: str) -> None:
    model, draft = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, that a field has no meaning without beams
        got = echelon.hf.generate(model, **inputs(**{name: IRRELEVANT[name]}), assistant_model=draft)
    assert torch.equal(got, model.generate(**inputs()))


def test_a_field_that_no_table_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = pair()
    monkeypatch.setattr(arguments, "HONOURED_FIELDS", arguments.HONOURED_FIELDS - {"top_h"})
    with pytest.raises(RequestError, match=r"top_h = 0\.5"):
        echelon.hf.generate(model, **inputs(do_sample=True, top_h=0.5), assistant_model=draft)


def gpt2() -> Any:
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None)
    return toys.randomised(GPT2LMHeadModel, config, 0, 0.3)


MODEL_INPUTS: dict[str, Any] = {
    "position_ids": torch.arange(30)[None] * 3,
    "token_type_ids": torch.full((5, 30), 7),
    "inputs_embeds": torch.zeros(5, 30, 64),
    "past_key_values": DynamicCache(),
    "encoder_hidden_states": torch.zeros(5, 3, 64),
    **dict.fromkeys(sorted(TransformersKwargs.__optional_keys__ - {"output_hidden_states", "output_attentions"}), 1),
}


@pytest.mark.parametrize("name", MODEL_INPUTS)
@pytest.mark.parametrize("door", ["function", "method"])
def test_what_the_model_would_not_be_given_is_refused_by_name(name: str, door: str) -> None:
    model = gpt2()
    given = inputs(**{name: MODEL_INPUTS[name]})
    ngram = {"method": "ngram", "num_speculative_tokens": 5}
    own = {"speculative_config": ngram} if door == "function" else {"custom_generate": echelon.hf.speculate(speculative_config=ngram)}
    call = functools.partial(echelon.hf.generate, model) if door == "function" else model.generate
    with pytest.raises(EchelonError, match=name):
        call(**given, **own)


def test_positions_that_count_each_rows_tokens_are_taken() -> None:
    model, draft = pair()
    positions = (padded()["attention_mask"].cumsum(1) - 1).clamp(min=0)
    got = echelon.hf.generate(model, **inputs(position_ids=positions), assistant_model=draft)
    assert torch.equal(got, model.generate(**inputs()))


def test_a_hole_in_the_mask_is_cut_out_or_refused_where_windows_count_it() -> None:
    model, draft = pair()
    mask = padded()["attention_mask"].clone()
    mask[:, -3] = 0
    mask[3] = padded()["attention_mask"][3]
    got = echelon.hf.generate(model, **inputs(attention_mask=mask), assistant_model=draft)
    assert torch.equal(got, model.generate(**inputs(attention_mask=mask)))
    config = MistralConfig(**(model.config.to_dict() | {"sliding_window": 4, "model_type": "mistral"}))
    windowed = toys.randomised(MistralForCausalLM, config, 0, 0.25)
    with pytest.raises(RequestError, match="attention_mask"):
        echelon.hf.generate(windowed, **inputs(attention_mask=mask), assistant_model=draft)
    assert torch.equal(echelon.hf.generate(windowed, **inputs(), assistant_model=draft), windowed.generate(**inputs()))


@pytest.mark.parametrize("name", ["streamer", "assistant_model", "synced_gpus"])
def test_what_transformers_hands_to_no_method_is_refused_there(name: str) -> None:
    model, draft = pair()
    values = {"streamer": type("S", (), {"put": lambda *_: None, "end": lambda *_: None})(), "assistant_model": draft, "synced_gpus": True}
    with pytest.raises(RequestError, match=name):
        model.generate(**inputs(), custom_generate=echelon.hf.speculate(draft), **{name: values[name]})


def test_arguments_by_position_and_as_objects() -> None:
    model, draft = pair()
    given = inputs()
    config = GenerationConfig(**GREEDY, eos_token_id=EOS)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    criteria = StoppingCriteriaList([MaxLengthCriteria(36)])
    by_position = (given["input_ids"], config, processors, criteria)
    expected = model.generate(*by_position, attention_mask=given["attention_mask"])
    got = echelon.hf.generate(model, *by_position, attention_mask=given["attention_mask"], assistant_model=draft)
    assert torch.equal(got, expected)


class LastIsSure(StoppingCriteria):
    """A row ends with a token that is likelier than most."""

    def __init__(self, is_pure: bool) -> None:
        self.is_pure = is_pure

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return scores[-1].softmax(-1).amax(-1) > 0.5


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("longest", [8, 30, 36, 60])
def test_a_criterion_of_length_stands_in_the_place_of_the_configurations(longest: int, eos: list[int] | None, pure: bool) -> None:
    """Whether it is below or above that; and whatever else makes rows end, or steps wait for each other."""
    model, draft = pair()

    def options() -> dict[str, Any]:
        given = inputs(eos_token_id=eos, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(longest)]))
        return given if pure else given | {"logits_processor": LogitsProcessorList([Twice()])}

    expected = model.generate(**options())
    if eos is None:
        assert expected.shape[1] == max(longest, options()["input_ids"].shape[1] + 1)
    assert torch.equal(echelon.hf.generate(model, **options(), assistant_model=draft), expected)


@pytest.mark.parametrize("pure", [False, True])
def test_criteria_see_the_scores_that_are_kept(pure: bool) -> None:
    model, draft = pair()

    def options() -> dict[str, Any]:
        return inputs(**DICT, eos_token_id=EOS, stopping_criteria=StoppingCriteriaList([LastIsSure(pure)]))

    expected = model.generate(**options())
    found = echelon.hf.generate(model, **options(), assistant_model=draft)
    assert torch.equal(found.sequences, expected.sequences)


def test_what_asks_for_no_custom_method_asks_for_nothing() -> None:
    model, draft = pair()
    assert torch.equal(echelon.hf.generate(model, **inputs(), assistant_model=draft, custom_generate=None), model.generate(**inputs()))


class Twice(LogitsProcessor):
    """Keeps state, for all that is known."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2.0


@pytest.mark.parametrize("pure", [False, True])
def test_allowed_tokens_are_asked_for_by_row(pure: bool) -> None:
    model, draft = pair()

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return list(range(row + int(ids[-1]) % 3, 96, 5))

    allowed.is_pure = pure  # type: ignore[attr-defined]
    got = echelon.hf.generate(model, **inputs(prefix_allowed_tokens_fn=allowed), assistant_model=draft)
    assert torch.equal(got, model.generate(**inputs(prefix_allowed_tokens_fn=allowed)))


def test_an_assistant_by_name_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = pair()
    draft.save_pretrained(tmp_path)
    reads: list[str] = []
    whole = echelon.hf.prepared.load_model
    monkeypatch.setattr(echelon.hf.prepared, "load_model", lambda name, **given: reads.append(name) or whole(name, **given))
    expected = model.generate(**inputs())
    for assistant in (str(tmp_path), tmp_path):
        assert torch.equal(echelon.hf.generate(model, **inputs(), assistant_model=assistant), expected)
    named = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    assert torch.equal(echelon.hf.generate(model, **inputs(), speculative_config=named), expected)
    assert reads == [str(tmp_path)]


def test_prompt_lookup_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    asked: list[Any] = []
    whole = echelon.hf.LLM
    monkeypatch.setattr(echelon.hf, "LLM", lambda *given, **more: asked.append(given[1]) or whole(*given, **more))
    echelon.hf.generate(model, **inputs(prompt_lookup_num_tokens=7, max_matching_ngram_size=3))
    echelon.hf.generate(model, **inputs(num_assistant_tokens=20), assistant_model=model)
    lookup, assisted = asked
    assert (lookup.method, lookup.num_speculative_tokens, lookup.prompt_lookup_min, lookup.prompt_lookup_max) == ("ngram", 7, 1, 3)
    assert (assisted.method, assisted.num_speculative_tokens) == ("draft_model", 20)


def test_prompt_lookup_drafts_for_several_samples_of_a_prompt() -> None:
    """Which the framework's own assisted decoding refuses; with one token to draw from all of them are the likeliest text."""
    model, _ = pair()
    given = inputs(do_sample=True, top_k=1, num_return_sequences=3)
    got = echelon.hf.generate(model, **given, prompt_lookup_num_tokens=5)
    assert len(got) == 3 * len(given["input_ids"])
    assert torch.equal(got, model.generate(**given))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two drafters": ({"assistant_model": "draft", "prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "two methods": ({"assistant_model": "draft", "speculative_config": {"method": "ngram"}}, "two drafters"),
    "two lengths": (
        {"num_assistant_tokens": 3, "assistant_model": "draft", "speculative_config": {"method": "draft_model"}},
        "num_assistant",
    ),
    "a long draft": ({"num_assistant_tokens": 300, "assistant_model": "draft"}, "num_assistant_tokens = 300"),
    "a long lookup": ({"prompt_lookup_num_tokens": 300}, "prompt_lookup_num_tokens = 300"),
    "no lookup": ({"prompt_lookup_num_tokens": "x"}, "prompt_lookup_num_tokens"),
    "an n-gram of nothing": ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 0}, "max_matching_ngram_size = 0 is not"),
    "nobody who drafts so many": ({"num_assistant_tokens": 3}, "num_assistant_tokens is how many tokens an assistant_model drafts"),
    "assistant of a wrong kind": ({"assistant_model": 3}, "assistant_model is a int"),
    "configuration of a wrong kind": ({"speculative_config": "ngram"}, "speculative_config is a str"),
    "no folder": ({"assistant_model": "/no/such/folder"}, "does not exist"),
    "a list of ids": ({"input_ids": [[1, 2]]}, "input_ids has list"),
    "text": ({"input_ids": "hello"}, "input_ids has str"),
    "one axis": ({"input_ids": torch.arange(3)}, r"input_ids has shape \[3\]"),
    "no ids": ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, r"input_ids has shape \[2, 0\]"),
    "floats": ({"input_ids": torch.zeros(5, 30)}, "float32"),
    "an id outside": ({"input_ids": torch.full((5, 30), 200)}, "200 is outside the vocabulary"),
    "a negative id": ({"input_ids": torch.full((5, 30), -1)}, "-1 is outside the vocabulary"),
    "another mask": ({"attention_mask": torch.ones(5, 7)}, "attention_mask"),
    "weights in the mask": ({"attention_mask": torch.full((5, 30), 2)}, "attention_mask"),
    "nothing kept": ({"attention_mask": torch.zeros(5, 30)}, "empty"),
    "one processor": ({"logits_processor": TemperatureLogitsWarper(0.5)}, "logits_processor is a TemperatureLogitsWarper"),
    "one criterion": ({"stopping_criteria": MaxLengthCriteria(9)}, "stopping_criteria is a MaxLengthCriteria"),
    "a configuration as a dictionary": ({"generation_config": {}}, "generation_config is a dict"),
    "a mask of lists": ({"attention_mask": [[1]]}, "attention_mask has list"),
    "too long": ({"max_new_tokens": 500}, "max_new_tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_end_in_errors_that_name_them(case: str) -> None:
    model, draft = pair()
    given, message = WRONG[case]
    given = {name: draft if value == "draft" else value for name, value in given.items()} if "draft" in map(str, given.values()) else given
    with pytest.raises(EchelonError, match=message):
        echelon.hf.generate(model, **inputs(**given))


@pytest.mark.parametrize("pure", [False, True])
def test_errors_say_which_row_of_the_ids_is_meant(pure: bool) -> None:
    model, draft = pair()
    given = inputs(logits_processor=None if pure else LogitsProcessorList([Twice()]))
    given["input_ids"][2, -1] = 200
    with pytest.raises(RequestError, match=r"input_ids\[2\]: token id 200 is outside the vocabulary"):
        echelon.hf.generate(model, **given, assistant_model=draft)


@pytest.mark.parametrize("model", ["gpt2", None, Path("x"), torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="model is a"):
        echelon.hf.generate(model, torch.ones(1, 2, dtype=torch.long))


@pytest.mark.parametrize("door", ["function", "method", "assistant"])
def test_encoder_decoder_models_get_one_clear_line(door: str) -> None:
    config = T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    t5, ids = T5ForConditionalGeneration(config).eval(), torch.ones(1, 3, dtype=torch.long)
    calls = {
        "function": lambda: echelon.hf.generate(t5, ids, max_new_tokens=3),
        "method": lambda: t5.generate(ids, max_new_tokens=3, custom_generate=echelon.hf.speculate()),
        "assistant": lambda: echelon.hf.generate(toys.llama(), ids, assistant_model=t5, max_new_tokens=3),
    }
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        calls[door]()
