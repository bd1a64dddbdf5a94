"""Hidden states of every architecture, attached in ragged batches, are those that the framework reports for each row alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import toys
from decoders import UNTIED
from test_decoders import DECODERS, model
from transformers import Cohere2Config, Cohere2ForCausalLM, GraniteConfig, GraniteForCausalLM

from echelon import LLM, UnsupportedModelError
from echelon.batch import Span
from echelon.heads.checkpoints import shared_parts
from echelon.model.attention import RecordingAttention, run_one_token
from echelon.model.hidden_states import HiddenStateReader

LENGTHS = (9, 1, 20)
WITHOUT_NORM = {"opt-350m"}


def expected(name: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    """[T, d] by name, from the framework's own bookkeeping."""
    plain, found = model(name), {}
    layers = next(m for m in plain.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        found["last_unnormed"] = (output if isinstance(output, torch.Tensor) else output[0])[0]

    handle = layers[-1].register_forward_hook(note)
    with torch.inference_mode():
        out = plain(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        base = plain.base_model(input_ids=torch.tensor([tokens]), use_cache=False)
    handle.remove()
    return found | {"last": base[0][0], "layer:0": out.hidden_states[0][0], "layer:1": out.hidden_states[1][0]}


@pytest.mark.parametrize("name", DECODERS)
def test_they_are_the_frameworks_hidden_states(name: str) -> None:
    names = ["layer:1", "last", "layer:0", *(["last_unnormed"] if name not in WITHOUT_NORM else [])]
    llm = LLM(toys.adopted(model(name)), kv_cache_memory_bytes=1 << 22)
    runner = llm.engine.target
    runner.hidden_state_reader = reader = HiddenStateReader(llm.target.model, names)
    rows = [[t % 70 + 5 for t in p] for p in toys.prompts(LENGTHS)]
    pieces: list[list[torch.Tensor]] = [[] for _ in rows]
    for half in (0, 1):  # prompts in two pieces, the second beside another row's first
        spans = [s for i, row in enumerate(rows) if (s := piece(i, row, half)) is not None]
        for span in spans:
            assert runner.cache.tables.reserve(span.row, span.start + len(span.tokens))
        _, features = runner.run(runner.pack(spans))
        assert features is not None
        for span, part in zip(spans, features.split([len(s.tokens) for s in spans]), strict=True):
            runner.cache.tables.advance(span.row, span.start + len(span.tokens))
            pieces[span.row].append(part)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llm.target.model.modules()), "hooks stay"
    for i, row in enumerate(rows):
        by_name = expected(name, row)
        got = torch.cat(pieces[i])
        start = 0
        for wanted in reader.names:
            width = by_name[wanted].shape[1]
            assert torch.allclose(got[:, start : start + width], by_name[wanted], rtol=1e-3, atol=1e-3), wanted
            start += width
        assert start == got.shape[1]


def test_another_thread_that_runs_the_model_is_not_read() -> None:
    """Hooks hang on modules, and two engines may share them."""
    loaded = toys.adopted(model("llama"))
    reader = HiddenStateReader(loaded.model, ("last", "last_unnormed", "layer:1"))
    with reader.reading() as states, ThreadPoolExecutor(1) as other:
        run_one_token(loaded.model, RecordingAttention())
        mine = dict(states)
        other.submit(run_one_token, loaded.model, RecordingAttention()).result()
        assert states.keys() == mine.keys() and all(states[name] is mine[name] for name in mine)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere2"])
def test_heads_see_logits_as_the_model_makes_them(name: str) -> None:
    """Some scale or cap what the output layer gives."""
    torch.manual_seed(0)
    scaled = {"granite": (GraniteForCausalLM, GraniteConfig(**UNTIED, logits_scaling=8.0)),
              "cohere2": (Cohere2ForCausalLM, Cohere2Config(**(UNTIED | {"pad_token_id": 0}), head_dim=16, logit_scale=0.25))}  # fmt: skip
    plain = scaled[name][0](scaled[name][1]).eval() if name in scaled else model(name)
    ids = torch.tensor([[5, 9, 11, 40]])
    with torch.inference_mode():
        out, states = plain(input_ids=ids, use_cache=False), plain.base_model(input_ids=ids, use_cache=False)[0]
        assert torch.allclose(shared_parts(plain).output(states[0]).float(), out.logits[0].float(), rtol=1e-5, atol=1e-5)


def piece(i: int, row: list[int], half: int) -> Span | None:
    middle = len(row) // 2
    tokens = row[middle:] if half else row[:middle]
    return Span(i, middle if half else 0, tokens, 1, len(row)) if tokens else None


@pytest.mark.parametrize(
    ("name", "wanted", "reason"),
    [
        ("llama", "layer:2", "has layers 0 to 1"),
        ("llama", "layer:x", "has layers 0 to 1"),
        ("llama", "middle", "there is no hidden state"),
        ("opt-350m", "last_unnormed", "no norm at its end"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(name: str, wanted: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        HiddenStateReader(toys.adopted(model(name)).model, [wanted])
