"""Processors, criteria, streamers, scores and logits under `echelon.hf`: as `generate` has them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_hf import padded, pair
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TopPLogitsWarper,
)
from transformers.generation import BaseStreamer

import echelon.hf
from echelon import RequestError
from echelon.hf.in_order import Texts
from echelon.ops import devices

SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123, 340, 443, 597, 160, 57])
EOS = {"eos_token_id": list(range(20, 96, 7))}
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
DRAFTS = ("plain", "draft", "ngram")


def speculated(model: Any, drafter: str, draft: Any, **options: Any) -> Any:
    how = {
        "plain": {},
        "draft": {"assistant_model": draft},
        "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
    }[drafter]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what keeps no token drafted
        return echelon.hf.generate(model, **padded(), **how, **options)


class Recorder(LogitsProcessor):
    """Keeps state: its answer depends on how often it was asked. Notes what it was shown."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Size]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append((input_ids.clone(), scores.shape))
        return scores.roll(len(self.calls), -1)


class StopsTogether(StoppingCriteria):
    """Ends all rows at its sixth call."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.shapes.append(input_ids.shape)
        return torch.full((len(input_ids),), len(self.shapes) == 6)


@pytest.mark.parametrize("drafter", DRAFTS)
@pytest.mark.parametrize("ends", [False, True])
def test_stateful_processors_are_called_in_order_as_generate_calls_them(drafter: str, ends: bool) -> None:
    model, draft = pair()
    found, calls = [], []
    for call in (model.generate, None):
        recorder = Recorder()
        options = GREEDY | (EOS if ends else {}) | {"logits_processor": LogitsProcessorList([recorder])}
        found.append(call(**padded(), **options) if call else speculated(model, drafter, draft, **options))
        calls.append(recorder.calls)
    assert torch.equal(*found)
    assert len(calls[0]) == len(calls[1]) > 1
    assert all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(*calls, strict=True))


@pytest.mark.parametrize("drafter", DRAFTS)
@pytest.mark.parametrize("ends", [False, True])
def test_stateful_criteria_are_called_in_order_as_generate_calls_them(drafter: str, ends: bool) -> None:
    model, draft = pair()
    theirs, ours = StopsTogether(), StopsTogether()
    options = GREEDY | (EOS if ends else {})
    expected = model.generate(**padded(), stopping_criteria=StoppingCriteriaList([theirs]), **options)
    got = speculated(model, drafter, draft, stopping_criteria=StoppingCriteriaList([ours]), **options)
    assert torch.equal(expected, got) and theirs.shapes == ours.shapes


@pytest.mark.parametrize("drafter", DRAFTS)
@pytest.mark.parametrize(
    "options",
    [
        {"watermarking_config": SYNTHID},
        {"guidance_scale": 1.5},
        {"guidance_scale": 2.5, "negative_prompt_ids": padded()["input_ids"][:, -4:]},
    ],
    ids=["synthid", "guidance", "negative prompt"],
)
def test_processors_of_transformers_that_keep_state_give_generates_text(options: dict[str, Any], drafter: str) -> None:
    model, draft = pair()
    assert torch.equal(model.generate(**padded(), **GREEDY, **options), speculated(model, drafter, draft, **GREEDY, **options))


def test_sampling_with_a_stateful_processor_is_the_same_whatever_drafts() -> None:
    model, draft = pair()
    texts = []
    for drafter in DRAFTS:
        torch.manual_seed(3)
        texts.append(
            speculated(model, drafter, draft, max_new_tokens=16, do_sample=True, top_k=0, pad_token_id=0, watermarking_config=SYNTHID)
        )
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_a_processor_that_may_keep_state_says_that_nothing_is_drafted() -> None:
    model, draft = pair()
    options = GREEDY | {"logits_processor": LogitsProcessorList([Recorder()])}
    with pytest.warns(UserWarning, match=r"Recorder may keep state.*is_pure"):
        echelon.hf.generate(model, **padded(), assistant_model=draft, **options)


def test_processors_see_a_row_a_place_not_the_batch_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of sampling grows with the rows, not with their square."""
    model, _ = pair()
    seen = [0]
    whole = TopPLogitsWarper.__call__

    def counted(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen[0] += len(scores)
        return whole(self, input_ids, scores)

    monkeypatch.setattr(TopPLogitsWarper, "__call__", counted)
    speculated(model, "plain", None, max_new_tokens=8, do_sample=True, top_p=0.9, pad_token_id=0)
    assert seen[0] == 8 * len(padded()["input_ids"])


@pytest.mark.parametrize("case", ["pure", "stateful"])
@pytest.mark.parametrize("ends", [False, True])
def test_scores_and_logits_are_generates_own(ends: bool, case: str) -> None:
    model, draft = pair()
    options = GREEDY | (EOS if ends else {}) | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options |= {"repetition_penalty": 1.2} | ({"watermarking_config": SYNTHID} if case == "stateful" else {})
    expected, got = model.generate(**padded(), **options), speculated(model, "draft", draft, **options)
    assert type(got) is type(expected) and torch.equal(expected.sequences, got.sequences)
    new = got.sequences[:, padded()["input_ids"].shape[1] :]
    is_live = torch.cat(
        [torch.ones(len(new), 1, dtype=torch.bool), ~torch.isin(new, torch.tensor(EOS["eos_token_id"])).cummax(1).values], 1
    )
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert isinstance(ours, tuple) and len(ours) == len(theirs) == new.shape[1]
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            live = is_live[:, place] if ends else slice(None)
            assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
            assert torch.allclose(a[live], b[live], atol=1e-4)
            assert not ends or not a[~is_live[:, place]].any()


class Puts(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends
        self.values.append(value)

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_streamer_is_given_what_generate_gives_it(num_rows: int, ends: bool, stateful: bool) -> None:
    model, draft = pair()
    batch = {name: value[:num_rows] for name, value in padded().items()}
    options = GREEDY | (EOS if ends else {}) | ({"guidance_scale": 1.5} if stateful else {})
    theirs, ours = Puts(), Puts()
    model.generate(**batch, **options, streamer=theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        echelon.hf.generate(model, **batch, **options, assistant_model=draft, streamer=ours)
    assert theirs.ends == ours.ends == 1
    assert [v.shape for v in ours.values] == [v.shape for v in theirs.values]
    assert all(torch.equal(a, b) for a, b in zip(ours.values, theirs.values, strict=True))


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_a_streamer_for_each_row_is_given_that_row(ends: bool, stateful: bool) -> None:
    model, draft = pair()
    batch, options = padded(), GREEDY | (EOS if ends else {}) | ({"guidance_scale": 1.5} if stateful else {})
    streamers = [Puts() for _ in batch["input_ids"]]
    out = speculated(model, "draft", draft, **options, streamer=streamers)
    for row, ids, streamer in zip(out, batch["input_ids"], streamers, strict=True):
        new = row[len(ids) :].tolist()
        if ends:
            new = new[: next((i + 1 for i, token in enumerate(new) if token in EOS["eos_token_id"]), len(new))]
        assert torch.equal(streamer.values[0], ids[None])
        assert torch.cat(streamer.values[1:]).tolist() == new
        assert streamer.ends == 1


@pytest.mark.parametrize("streamer", [object(), [Puts()], [Puts(), 3]])
def test_a_streamer_that_cannot_be_one_is_refused(streamer: Any) -> None:
    model, draft = pair()
    with pytest.raises(RequestError, match="streamer"):
        echelon.hf.generate(model, **padded(), **GREEDY, assistant_model=draft, streamer=streamer)


def test_rows_of_unequal_stops_without_an_end_token_are_cut_as_generate_cuts_them() -> None:
    """What a streamer has been given is never taken back."""
    model, draft = pair()

    class StopAt(StoppingCriteria):
        is_pure = True

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids[:, -1] % 5 == 0

    theirs, ours = Puts(), Puts()
    expected = model.generate(**padded(), **GREEDY, stopping_criteria=StoppingCriteriaList([StopAt()]), streamer=theirs)
    got = speculated(model, "draft", draft, **GREEDY, stopping_criteria=StoppingCriteriaList([StopAt()]), streamer=ours)
    assert torch.equal(expected, got)
    assert all(torch.equal(a, b) for a, b in zip(ours.values, theirs.values, strict=True))


def test_long_prompts_are_read_in_pieces_before_rows_go_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    wanted = speculated(model, "plain", None, **GREEDY, guidance_scale=1.5)
    monkeypatch.setattr("echelon.hf.in_order.PIECE", 7)
    assert torch.equal(speculated(model, "plain", None, **GREEDY, guidance_scale=1.5), wanted)


def test_one_token_a_step_gives_the_texts_of_the_engine_sampled_ones_too() -> None:
    model, draft = pair()

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    texts = []
    for processors in ([], [Nothing()]):
        torch.manual_seed(5)
        options = {
            "max_new_tokens": 20,
            "do_sample": True,
            "top_p": 0.9,
            "pad_token_id": 0,
            "logits_processor": LogitsProcessorList(processors),
        }
        texts.append(speculated(model, "draft", draft, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("stateful", [False, True])
def test_ids_of_32_bits_are_continued_as_generate_continues_them(stateful: bool) -> None:
    """By ids of 64 bits, which processors that are called in order are shown from the second token on."""
    model, draft = pair()
    batch = padded() | {"input_ids": padded()["input_ids"].int()}
    found, seen = [], []
    calls: list[tuple[Any, dict[str, Any]]] = [(model.generate, {}), (echelon.hf.generate, {"model": model, "assistant_model": draft})]
    for call, more in calls:
        recorder = Recorder()
        processors = {"logits_processor": LogitsProcessorList([recorder])} if stateful else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found.append(call(**batch, **GREEDY, **processors, **more))
        seen.append([ids.dtype for ids, _ in recorder.calls])
    expected, got = found
    assert got.dtype == expected.dtype == torch.int64
    assert torch.equal(got, expected)
    assert seen[0] == seen[1]


def test_rows_in_order_are_read_on_the_models_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the caller's current one: there kernels would be launched."""
    model, _ = pair()
    current: list[torch.device] = []
    seen: list[list[torch.device]] = []
    logits = Texts.logits

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def noted(self: Texts, rows: list[int]) -> torch.Tensor:
        seen.append(current[-1:])
        return logits(self, rows)

    monkeypatch.setattr(devices, "current", entered)
    monkeypatch.setattr(Texts, "logits", noted)
    speculated(model, "plain", None, **GREEDY, logits_processor=LogitsProcessorList([Recorder()]))
    assert seen == [[model.device]] * GREEDY["max_new_tokens"]
