"""What comes from outside: anything that is no prompt, parameter, model or folder ends in a typed error that names its place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys

import echelon
from echelon import LLM, AsyncLLM, ConfigError, EchelonError, EngineConfig, RequestError, SamplingParams, SpeculativeConfig
from echelon.demo import DRAFT
from echelon.heads.checkpoints import load_head
from echelon.model.load.loading import adopt_model, load_model, load_plain
from echelon.train.draft_model import DraftTraining, train_draft_model
from echelon.train.heads import TrainingConfig, train_head
from echelon.train.text import Data, prepare

GREEDY = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """By a path, which names a model as well as a string does."""
    return LLM(Path(DRAFT), max_num_seqs=2, kv_cache_memory_bytes=2**22)


NO_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompts is None"),
    (5, "prompts is an int"),
    (float("nan"), "prompts is a float"),
    ([1.5], r"prompts\[0\] = 1.5"),
    (["x", 1], r"prompts\[1\] is an int"),
    ([1, "x"], r"prompts\[1\] = 'x'"),
    ([[1], "x", None], r"prompts\[2\] is None"),
    (b"x", "prompts is a bytes"),
    (bytearray(b"x"), "prompts is a bytearray"),
    ([b"x"], r"prompts\[0\] is a bytes"),
    ([True], r"prompts\[0\] = True"),
    ([[1, True]], r"prompts\[0\]\[1\] = True"),
    ({}, "prompts has the keys"),
    ({0: 1}, "prompts has the keys"),
    ({"prompt_token_ids": [1.5]}, "prompts"),
    ([{}], r"prompts\[0\] has the keys"),
    ({1, 2}, "prompts is a set"),
    ((t for t in [1]), "prompts is a generator"),
    (Path("x"), "prompts is a PosixPath"),
    ([[None]], r"prompts\[0\]\[0\] = None"),
    ([1, [2]], r"prompts\[1\] = \[2\]"),
    (np.array([1.5]), r"prompts\[0\] = 1.5"),
    (np.array(3), r"prompts has the shape \[\]"),
    (np.array([[1, 2]]), r"prompts has the shape \[1, 2\].*without padding"),
    (torch.tensor([[1], [2]]), r"prompts has the shape \[2, 1\]"),
    (torch.tensor([True]), r"prompts\[0\] = True"),
    ([np.float32(1)], r"prompts\[0\] = 1.0"),
    ([-1], "prompts: token id -1 is outside the vocabulary of 4096, 0 to 4095"),
    ([[1], [5, 4096]], r"prompts\[1\]: token id 4096 is outside the vocabulary"),
    ([2**70], "prompts: token id 1180591620717411303424 is outside"),
    ([10**5000], "prompts: token id <an int> is outside"),
    ("", "prompts is empty"),
    (["a", ""], r"prompts\[1\] is empty"),
    ("\ud800", "prompts is no valid Unicode"),
    (["a", "b\udfff"], r"prompts\[1\] is no valid Unicode: a lone surrogate at character 1"),
]


@pytest.mark.parametrize(("value", "words"), NO_PROMPTS, ids=[words for _, words in NO_PROMPTS])
def test_what_is_no_prompt_is_refused_by_its_place(llm: LLM, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(value, GREEDY)
    if not inspect.isgenerator(value):
        with pytest.raises(RequestError, match=words):
            next(llm.stream(value, GREEDY))


def test_token_ids_in_any_container_give_one_text(llm: LLM) -> None:
    ids = [300, 301, 302]
    expected = llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    alone = [tuple(ids), range(300, 303), np.array(ids), np.array(ids, np.uint16), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)]
    for prompt in [*alone, [np.int64(t) for t in ids], [torch.tensor(t) for t in ids]]:
        assert [o.outputs[0].token_ids for o in llm.generate(prompt, GREEDY)] == [expected]
    assert [o.outputs[0].token_ids for o in llm.generate([*alone, ids], GREEDY)] == [expected] * 7
    assert llm.generate([]) == llm.generate(()) == []


NO_CONVERSATIONS: list[tuple[Any, str]] = [
    ("hi", "messages is a str"),
    (None, "messages is None"),
    ({}, "messages is a dict"),
    ({"role": "user", "content": "x"}, "messages is a dict"),
    (["hi"], r"messages\[0\] = 'hi'"),
    ([{}], r"messages\[0\].role: Field required"),
    ([{"role": "user"}], r"messages\[0\].content: Field required"),
    ([{"role": 5, "content": "x"}], r"messages\[0\].role = 5"),
    ([{"role": "user", "content": 5}], r"messages\[0\].content = 5: Input should be a valid string"),
    ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content = .*surrogate"),
    ([{"role": "user", "content": [{"type": "image", "text": ""}]}], r"messages\[0\].content\[0\].type = 'image'"),
    ([{"role": "user", "content": "x", 5: 6}], "Keys should be strings"),
    ([[]], r"messages\[0\]: .*at least 1 item"),
    ([[{"role": "user", "content": "x"}], None], r"messages\[1\] is None"),
    ([[{"role": "user", "content": "x"}], [{"role": "user"}]], r"messages\[1\]\[0\].content"),
]


@pytest.mark.parametrize(("value", "words"), NO_CONVERSATIONS, ids=[words for _, words in NO_CONVERSATIONS])
def test_what_is_no_conversation_is_refused_by_its_place(llm: LLM, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        llm.chat(value, GREEDY)
    assert "constrained-str" not in str(caught.value) and "function-after" not in str(caught.value)


def test_text_parts_are_the_text(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "he", "prompt_cache_breakpoint": {}}, {"type": "text", "text": "llo"}]}]
    assert llm.inputs.encode_chat(parts) == llm.inputs.encode_chat([{"role": "user", "content": "he\nllo"}]), "a line each, as in vLLM"


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_parameters_outside_the_vocabulary_are_refused_by_their_name(llm: LLM, field: str) -> None:
    for token in (-1, 4096, 2**70):
        value = {token: 1.0} if field == "logit_bias" else [1, token]
        with pytest.raises(RequestError, match=rf"{field}: token id {token} is outside the vocabulary of 4096"):
            llm.generate("a", SamplingParams(**{field: value}))


class Hostile:
    """An object whose text cannot be had."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


VALUES: list[Any] = [
    None, True, False, 0, 1, 5, -5, 2**31, 2**70, -(2**70), 10**5000, 1.5, 1e300, float("nan"), float("inf"), "x", "5", "", "\ud800", b"x",
    [], [1], ["x"], [None], ["\ud800"], [[1]], [[[[[]]]]], {}, {1: 2}, {"a": 1}, {"5": 1.0}, {True: 1.0}, {-1: 1.0}, {2**70: 1.0}, [-1],
    [2**70],    (1,), {1}, object(), Hostile(), [Hostile()], np.int64(3), np.float32(0.5), np.array([1, 2]), np.bool_(True),
    torch.tensor([3]), torch.tensor(3), Path("x"), (lambda *given: given[-1] if given else None),
    (x for x in [1]),
]  # fmt: skip
FIELDS = [(cls, name) for cls in (SamplingParams, EngineConfig, SpeculativeConfig) for name in cls.model_fields]


@pytest.mark.parametrize(("cls", "field"), FIELDS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_every_value_of_every_setting_is_taken_or_refused_by_name(llm: LLM, cls: Any, field: str) -> None:
    """What is taken serves: no error comes of it later but one of ours."""
    base = {SpeculativeConfig: {"method": "ngram"}, SamplingParams: {"max_tokens": 2}}.get(cls, {})
    for value in VALUES:
        try:
            made = cls(**{**base, field: value})
        except EchelonError as error:
            said = error
        else:
            said = None
        if said is not None:
            assert isinstance(said, cls.error) and field in str(said) and len(str(said)) < 1000
            continue
        assert not isinstance(value, bool) or isinstance(cls.model_fields[field].default, bool), "a truth value stands in for a number"
        if cls is SamplingParams and made.n < 9 and made.max_tokens is not None and made.max_tokens < 9:
            done = refused(lambda made=made: llm.generate([[1, 2]], made))
            assert done is None or all(o.error is None or "logits" in o.error for o in done[0].outputs)


def refused(call: Callable[[], Any]) -> Any:
    """What the call gives; nothing where it raises an error of ours. Any other passes."""
    try:
        result = call()
        return list(result) if isinstance(result, Iterator) else result
    except EchelonError as error:
        if not str(error).strip():
            raise AssertionError(f"{type(error).__name__} says nothing") from error
        return None


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 2**70), ("top_k", True), ("top_k", "5"), ("max_tokens", 5.0), ("seed", "1"), ("temperature", "0"), ("ignore_eos", "yes"),
     ("ignore_eos", 1), ("stop", 5), ("stop", ["\ud800"]), ("bad_words", ["\ud800"]), ("logit_bias", {True: 1.0}), ("self", 1)],
)  # fmt: skip
def test_no_type_stands_in_for_another(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1), stop_token_ids=np.array([1, 2]),
        allowed_token_ids=torch.tensor([4]), logit_bias={np.int64(5): np.float64(1.0)}, ignore_eos=np.bool_(True),
    )  # fmt: skip
    assert params == SamplingParams(
        temperature=0.5, top_k=3, seed=2**64 - 1, stop_token_ids=[1, 2], allowed_token_ids=[4], logit_bias={"5": 1.0}, ignore_eos=True
    )


@pytest.mark.parametrize(
    "value", ["x", b"x", 5, True, [], [("method", "ngram")], {1: 2}, {}, {"method": None}, {"method": "ngram", "x": 1}]
)
def test_what_is_no_speculative_config_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="peculative"):
        LLM(toys.adopted(toys.llama()), value)


@pytest.mark.parametrize("value", [None, 5, b"x", "", "a\0b", [], {}, object(), toys.llama()], ids=lambda v: type(v).__name__)
def test_what_is_no_model_is_refused(value: Any) -> None:
    for call in (LLM, load_model, load_plain):
        with pytest.raises(ConfigError, match=r"model is .*give a folder"):
            call(value)
    if value is not None:
        with pytest.raises(ConfigError, match="draft_model"):
            LLM(toys.adopted(toys.llama()), {"method": "draft_model"}, value)


@pytest.mark.parametrize("strategy", ["unpadded", "padded", "realign"])
@pytest.mark.parametrize("size", [10**15, 10**30])
def test_an_absurd_kv_size_says_what_is_available(strategy: str, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_memory_bytes = {size} exceeds the [\d,]+ bytes that are available on cpu; lower it"):
        LLM(toys.adopted(toys.llama()), kv_cache_memory_bytes=size, strategy=strategy)


TRAINED = toys.llama(num_hidden_layers=3, tie_word_embeddings=True)
SAID = np.zeros((8, 9), np.uint16)


def right_arguments(folder: Path, llm: LLM) -> dict[str, dict[str, Any]]:
    """Of every public function, arguments that it takes, by name."""
    loaded = toys.adopted(toys.llama())
    messages = [{"role": "user", "content": "x"}]
    many = {"prompts": "a", "sampling_params": GREEDY}
    one = {"prompt": "a", "params": GREEDY, "watch_text": False, "name": "prompt", "salt": b""}
    return {
        "LLM": {"model": loaded, "speculative_config": None, "draft_model": None, "draft_head": None},
        "AsyncLLM": {"model": loaded, "speculative_config": None, "draft_model": None, "draft_head": None, "max_queue": 4},
        "LLM.generate": {**many, "on_finish": None, "on_step": None, "use_tqdm": False},
        "LLM.stream": many,
        "LLM.chat": {"messages": messages, "sampling_params": GREEDY, "use_tqdm": False, "chat_template_kwargs": None},
        "LLM.get_tokenizer": {},
        "LLM.get_default_sampling_params": {},
        "InputProcessor.default_params": {},
        "InputProcessor.generation_settings": {},
        "InputProcessor.encode": {"text": "a", "add_special_tokens": True, "name": "prompt"},
        "InputProcessor.encode_chat": {"messages": messages, "name": "messages", "variables": None},
        "InputProcessor.check_prompt": {"tokens": [1], "params": GREEDY, "name": "prompt"},
        "InputProcessor.room_after": {"num_tokens": 4},
        "InputProcessor.samples": one,
        "LLM.run": {"requests": [llm.inputs.samples("a", GREEDY, False)]},
        "LLM.get_counters": {},
        "LLM.get_metrics": {},
        "LLM.reset_prefix_cache": {},
        "LLM.measure_costs": {},
        "LLM.close": {},
        "load_model": {"name": str(DRAFT), "dtype": "auto", "device": "cpu", "numerics": "invariant", "quantization": None},
        "load_plain": {"name": str(DRAFT)},
        "adopt_model": {"model": copy.deepcopy(TRAINED), "tokenizer": None, "name": "toy", "keep_weights": True, "numerics": "invariant",
                        "quantization": None},
        "load_head": {"name": str(folder / "no head"), "target": TRAINED, "dtype": None},
        "prepare": {"target": TRAINED, "tokenizer": None, "sources": None, "folder": folder / "data", "count": 4, "num_tokens": 9},
        "train_head": {"target": TRAINED, "data": Data({}, SAID, SAID), "out": folder / "file",
                       "config": TrainingConfig("medusa", 1), "report": None},
        "train_draft_model": {"target": TRAINED, "tokenizer": None, "tokens": {}, "out": folder / "file", "data": folder / "data",
                              "config": DraftTraining(steps=1)},
        "TrainingConfig": {"method": "medusa", "steps": 1, "rate": None, "every": 1, "seed": 0,
                           "is_soft": None, "options": (), "depth": None, "fine_tuning": None, "batch_size": 8},
    }  # fmt: skip


def public_functions(llm: LLM) -> dict[str, Callable[..., Any]]:
    """Functions and methods that users call; settings have a test of their own."""
    methods = {
        f"{type(of).__name__}.{n}": getattr(of, n)
        for of in (llm, llm.inputs)
        for n in dir(type(of))
        if not n.startswith("_") and inspect.isfunction(getattr(type(of), n))
    }
    del methods["LLM.exclusive"]  # takes nothing
    loading = (load_model, load_plain, adopt_model, load_head, prepare, train_head, train_draft_model, TrainingConfig)
    return {"LLM": LLM, "AsyncLLM": AsyncLLM, **methods, **{f.__name__: f for f in loading}}


def test_no_public_signature_ends_in_an_error_of_pythons_own(llm: LLM, tmp_path: Path) -> None:
    """Every argument of every public function in turn is everything that it should not be; training is kept from beginning by a file in
    the place of its folder, and heads by there being none.
    """
    (tmp_path / "file").write_text("")
    right = right_arguments(tmp_path, llm)
    functions = public_functions(llm)
    assert right.keys() == functions.keys(), "a public function is not tried"
    left_out = ("x", "5")  # names that a hub might have
    values = [v for v in VALUES if v is not None and not (isinstance(v, str) and v in left_out) and not isinstance(v, np.generic | Path)]
    values = [v for v in values if not inspect.isgenerator(v)] + ["/proc/nowhere"]
    found, flags = [], ("watch_text", "keep_weights")
    for name, function in functions.items():
        parameters = {n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD}
        assert parameters == right[name].keys(), f"{name}: an argument is not tried"
        for argument in parameters:
            for value in values:
                if argument in flags and isinstance(value, np.ndarray):
                    continue  # has no truth value, as NumPy itself says
                try:
                    refused(lambda: function(**{**right[name], argument: value}))  # noqa: B023
                except Exception as error:
                    found.append(f"{name}({argument}={type(value).__name__}): {type(error).__name__}: {str(error)[:80]}")
    assert not found, "\n".join(found)


def test_everything_exported_is_tried() -> None:
    """What `echelon` exports beside these is an error, or comes out of the engine."""
    settings = {"LLM", "AsyncLLM", "__version__", "SamplingParams", "EngineConfig", "SpeculativeConfig", "load_model"}
    results = {"CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"}
    assert {n for n in echelon.__all__ if not n.endswith("Error")} == settings | results
