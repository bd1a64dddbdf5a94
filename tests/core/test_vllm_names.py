"""Scripts written for vLLM run with the import changed, and its names mean what they mean there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import corruptions
import pytest
import torch

import echelon
from echelon import LLM, ConfigError, RequestError, SamplingParams, load_model

PROMPTS = ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11"]
BASIC = """
from echelon import LLM, SamplingParams

prompts = ["w3 w4 w5", "w6 w7"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

def main():
    llm = LLM(model={folder!r}, seed=0)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {{output.prompt!r}}, output: {{output.outputs[0].text!r}}")

if __name__ == "__main__":
    main()
"""
CHAT = """
from echelon import LLM, SamplingParams

llm = LLM(model={folder!r}, trust_remote_code=False)
conversation = [{{"role": "system", "content": "w1"}}, {{"role": "user", "content": "w3 w4"}}]
outputs = llm.chat(conversation, sampling_params=SamplingParams(max_tokens=4), use_tqdm=False)
outputs += llm.chat([conversation for _ in range(3)], SamplingParams(max_tokens=4), use_tqdm=True)
for output in outputs:
    print(output.prompt_token_ids, output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason)
"""
SPECULATIVE = """
from echelon import LLM, SamplingParams

llm = LLM(
    model={folder!r},
    speculative_config={{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    max_model_len=64, max_num_seqs=4, enforce_eager=False, gpu_memory_utilization=0.9,
)
prompt_ids = llm.get_tokenizer().encode("w3 w4 w3 w4 w3")
outputs = llm.generate([{{"prompt_token_ids": prompt_ids}}], sampling_params=SamplingParams(temperature=0, max_tokens=8))
print(len(outputs[0].outputs[0].token_ids), outputs[0].finished)
"""
METRICS = """
from echelon import LLM, SamplingParams
from echelon.metrics import Counter, Vector

llm = LLM(model={folder!r}, speculative_config={{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}})
outputs = llm.generate(["w3 w4 w3 w4 w3"] * 4, SamplingParams(temperature=0, max_tokens=16))
total_num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
num_drafts = num_draft_tokens = num_accepted_tokens = 0
acceptance_counts = [0] * 3
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        num_drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        assert isinstance(metric, Counter)
        num_draft_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        assert isinstance(metric, Counter)
        num_accepted_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for pos in range(len(metric.values)):
            acceptance_counts[pos] += metric.values[pos]
assert num_draft_tokens >= num_drafts > 0 and sum(acceptance_counts) == num_accepted_tokens
print(total_num_output_tokens, num_drafts, num_draft_tokens, num_accepted_tokens, acceptance_counts)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    corruptions.save_model(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_num_seqs=4)


@pytest.mark.parametrize(("script", "num_lines"), [(BASIC, 2), (CHAT, 4), (SPECULATIVE, 1), (METRICS, 1)])
def test_a_script_runs_with_the_import_changed(script: str, num_lines: int, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(script.format(folder=str(folder)))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == num_lines, done.stdout


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **{"max_tokens": 6} | more)


def tokens_of(outputs: list[echelon.RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_are_texts_ids_or_mappings(llm: LLM) -> None:
    ids = [llm.get_tokenizer().encode(p) for p in PROMPTS]
    wanted = llm.generate(PROMPTS, greedy())
    for prompts in (ids, [{"prompt": p} for p in PROMPTS], [{"prompt_token_ids": i} for i in ids]):
        assert tokens_of(llm.generate(prompts, greedy())) == tokens_of(wanted)
    both = llm.generate({"prompt": PROMPTS[0], "prompt_token_ids": ids[0]}, greedy())
    assert tokens_of(both) == tokens_of(wanted[:1]) and both[0].prompt == PROMPTS[0]
    assert [o.prompt for o in llm.generate([{"prompt": PROMPTS[1]}, {"prompt_token_ids": ids[1]}], greedy())] == [PROMPTS[1], None]


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": "w3", "multi_modal_data": {}}, {"text": "w3"}, {"prompt": 5}])
def test_other_mappings_are_refused(llm: LLM, prompt: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]"):
        llm.generate(["w3", prompt], greedy())


def test_sampling_parameters_are_mappings_too(llm: LLM) -> None:
    asked = {"temperature": 0.0, "max_tokens": 6}
    wanted = tokens_of(llm.generate(PROMPTS, greedy()))
    assert tokens_of(llm.generate(PROMPTS, asked)) == tokens_of(llm.generate(PROMPTS, [asked] * 3)) == wanted
    with pytest.raises(RequestError, match="has no key 'max_token'"):
        llm.generate(PROMPTS, {"max_token": 6})
    with pytest.raises(RequestError, match="temperature"):
        llm.generate(PROMPTS, [{}, {"temperature": -1.0}, {}])


def test_parameters_are_assigned_to_and_checked(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    params.temperature, params.max_tokens, params.stop = 0.0, 6, "never"
    assert params == greedy(stop=("never",)) and params.model_fields_set == {"temperature", "max_tokens", "stop"}
    assert tokens_of(llm.generate(PROMPTS, params)) == tokens_of(llm.generate(PROMPTS, greedy()))
    for name, value, problem in (
        ("max_token", 4, "has no key 'max_token'"),
        ("temperature", -1.0, r"temperature = -1\.0"),
        ("min_tokens", 9, "min_tokens = 9 exceeds max_tokens = 6"),
    ):
        with pytest.raises(RequestError, match=problem):
            setattr(params, name, value)
    assert params == greedy(stop=("never",)), "what is refused changes nothing"


def test_a_request_keeps_the_parameters_it_was_given_with(llm: LLM) -> None:
    wanted = tokens_of(llm.generate(PROMPTS, greedy(ignore_eos=True)))
    params = greedy(ignore_eos=True, logit_bias={5: 0.0})
    running = llm.stream(PROMPTS, params)
    latest = dict([next(running)])
    params.max_tokens, params.temperature = 1, 2.0
    assert params.logit_bias is not None
    params.logit_bias[5] = 100.0
    latest |= dict(running)
    assert tokens_of([latest[i] for i in range(len(PROMPTS))]) == wanted
    assert llm.generate(PROMPTS, params)[0].outputs[0].token_ids == [5], "the next ones have the new values"


def test_requests_without_parameters_have_those_of_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder)
    assert llm.get_default_sampling_params() == SamplingParams()
    settings = llm.inputs._target.model.generation_config
    for name, value in {"temperature": 0.5, "top_k": 3, "max_new_tokens": 5}.items():
        monkeypatch.setattr(settings, name, value)
    own = llm.get_default_sampling_params()
    assert own == SamplingParams(temperature=0.5, top_k=3, max_tokens=5)
    own.seed = 1
    assert llm.get_default_sampling_params().seed is None
    assert [len(tokens) for tokens in tokens_of(llm.generate(PROMPTS))] == [5] * 3
    monkeypatch.setattr(settings, "temperature", -1.0)
    with pytest.raises(RequestError, match=r"generation settings of .* cannot be used .*temperature = -1\.0.*give sampling_params"):
        llm.generate(PROMPTS)
    assert len(llm.generate(PROMPTS, greedy())) == 3


def test_without_max_tokens_a_text_fills_the_context(folder: Path) -> None:
    llm = LLM(folder, max_model_len=40, max_num_seqs=2)
    (output,) = llm.generate(PROMPTS[:1], greedy(max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
    assert output.outputs[0].finish_reason == "length"
    assert greedy(max_tokens=None, min_tokens=9).min_tokens == 9


def test_without_max_tokens_a_small_pool_bounds_a_text(folder: Path) -> None:
    whole = LLM(folder, max_num_seqs=1)
    bytes_of_three = 3 * 16 * whole.engine.target.cache.bytes_per_slot
    llm = LLM(folder, max_num_seqs=1, kv_cache_memory_bytes=bytes_of_three)
    room = llm.inputs.room_after(0)
    (output,) = llm.generate(PROMPTS[:1], greedy(max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == room


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1).seed is None
    with pytest.raises(RequestError, match="seed"):
        SamplingParams(seed=-2)


def test_what_stopped_a_text_is_said(llm: LLM) -> None:
    tokens = tokens_of(llm.generate(PROMPTS[:1], greedy(ignore_eos=True)))[0]
    (ended,) = llm.generate(PROMPTS[:1], greedy(stop_token_ids=[tokens[2]], ignore_eos=True))
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", tokens[2])
    word = f"w{tokens[1]}"
    (stopped,) = llm.generate(PROMPTS[:1], greedy(stop=["never", word], ignore_eos=True))
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", word)
    (long,) = llm.generate(PROMPTS[:1], greedy(ignore_eos=True))
    assert (long.outputs[0].finish_reason, long.outputs[0].stop_reason) == ("length", None)


def test_no_list_is_an_empty_one() -> None:
    given = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logits_processors=None)
    assert given == SamplingParams()


def test_end_of_text_is_no_stop_reason(folder: Path) -> None:
    llm = LLM(folder)
    first = tokens_of(llm.generate(PROMPTS[:1], greedy(ignore_eos=True)))[0][0]
    llm.inputs._target.model.generation_config.eos_token_id = first
    (output,) = llm.generate(PROMPTS[:1], greedy())
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ([first], "stop", None)


def test_a_seed_of_the_engine_seeds_requests_without_one(folder: Path) -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=8)
    runs = [tokens_of(LLM(folder, seed=seed).generate(PROMPTS, drawn)) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]
    assert len({str(r) for r in runs[0]}) == 3
    own = SamplingParams(temperature=1.0, max_tokens=8, seed=3)
    assert tokens_of(LLM(folder, seed=7).generate(PROMPTS, own)) == tokens_of(LLM(folder).generate(PROMPTS, own))


def test_without_a_tokenizer_prompts_are_ids(folder: Path, llm: LLM) -> None:
    bare = LLM(folder, skip_tokenizer_init=True)
    ids = [llm.get_tokenizer().encode(p) for p in PROMPTS]
    outputs = bare.generate(ids, greedy())
    assert tokens_of(outputs) == tokens_of(llm.generate(ids, greedy()))
    assert {o.outputs[0].text for o in outputs} == {""}
    with pytest.raises(RequestError, match="has no tokenizer"):
        bare.generate(PROMPTS, greedy())
    with pytest.raises(ConfigError, match="has no tokenizer here"):
        bare.get_tokenizer()


def test_a_dtype_has_pytorch_s_names_too(folder: Path) -> None:
    for dtype in ("half", torch.float16, "float16"):
        loaded = LLM(folder, dtype=dtype)
        assert loaded.target.model.dtype == torch.float16 and loaded.config.dtype == "float16"
    assert load_model(folder, dtype=torch.float16).model.dtype == torch.float16
    assert LLM(folder, dtype="float").config.dtype == "float32"
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        LLM(folder, dtype=torch.int8)


def test_a_model_without_a_method_drafts_as_a_model(folder: Path) -> None:
    llm = LLM(folder, speculative_config={"model": str(folder), "num_speculative_tokens": 3})
    assert llm.speculative_config is not None and llm.speculative_config.method == "draft_model"
    assert tokens_of(llm.generate(PROMPTS, greedy())) == tokens_of(LLM(folder).generate(PROMPTS, greedy()))
    with pytest.raises(ConfigError, match=r"SpeculativeConfig\.method is missing; give it: What drafts: ngram, draft_model"):
        LLM(folder, speculative_config={"num_speculative_tokens": 3})


def test_all_unknown_settings_are_named_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no key 'swap_space' or 'revision'; known keys: dtype") as refused:
        LLM(folder, swap_space=4, revision="main")
    assert str(refused.value).count("known keys") == 1


def test_no_code_of_a_checkpoint_is_trusted(folder: Path) -> None:
    assert LLM(folder, trust_remote_code=False).config.trust_remote_code is False
    with pytest.raises(ConfigError, match="trust_remote_code"):
        LLM(folder, trust_remote_code=True)


class Bar:
    """Counts what a bar is told."""

    made: list[Bar] = []  # noqa: RUF012

    def __init__(self, total: int, **_: Any) -> None:
        self.total, self.done, self.is_closed = total, 0, False
        Bar.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def update(self, count: int) -> None:
        self.done += count


def test_a_bar_shows_what_is_done(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    Bar.made.clear()
    llm.generate(PROMPTS, greedy(), use_tqdm=Bar)
    assert [(b.total, b.done, b.is_closed) for b in Bar.made] == [(3, 3, True)]
    capfd.readouterr()
    llm.generate(PROMPTS, greedy())
    assert capfd.readouterr().err == "", "nobody watches a file"
    with pytest.raises(RequestError, match="use_tqdm"):
        llm.generate(PROMPTS, greedy(), use_tqdm="yes")  # type: ignore[arg-type]


def test_a_version_is_there() -> None:
    done = subprocess.run([sys.executable, "-m", "echelon", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"echelon {echelon.__version__}\n"
