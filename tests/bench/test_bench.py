"""Benchmarks measure what they say: phases of a run, prompts read once, arrivals, workloads, peers, and the document."""

from __future__ import annotations

import json
import runpy
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from matplotlib.figure import Figure

from benchmarks import questions, tables, workloads
from benchmarks.cells import Cell, Records, run_cells
from benchmarks.document import findings, write_document
from benchmarks.prefill import PrefilledRun, check_memory, decode, read_prefixes
from benchmarks.questions import other_questions
from benchmarks.replayed import AcceptanceHistogram, mean_tokens_per_step, replay, rescaled
from benchmarks.workloads import tokens_a_step
from echelon import LLM, ConfigError, SamplingParams
from echelon.bench import framework, peers
from echelon.bench.framework import FrameworkRun, framework_runs, in_fastest_dtype
from echelon.bench.latency import Latency, arrivals, serve
from echelon.bench.phases import SPLIT, Recorder
from echelon.bench.plot import latency_charts
from echelon.bench.report import adaptive_as_markdown, speeds_as_markdown
from echelon.bench.throughput import DecodingMethod, ThroughputResult, default_methods, from_json, measure, methods_of
from echelon.bench.verify import STRATEGY_SETTINGS
from echelon.bench.workloads import code_prompts, edit_prompts, ems_prompt, renamed, workload
from echelon.cli import main
from echelon.cli.runs import ThroughputOptions
from echelon.demo import DRAFT, TARGET, held_out_files
from echelon.drafters.ngram import NgramDrafter
from echelon.model.load.loading import LoadedModel, load_model
from echelon.ops import compiled

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = toys.prompts((3, 17, 1, 33, 8))
DRAFTING: list[dict[str, Any]] = [dict(m.config) for m in default_methods() if m.config is not None]
HISTOGRAM = [[0, 0, 30], [7, 0, 10], [7, 1, 8], [7, 3, 5], [7, 7, 6]]


@cache
def target() -> LoadedModel:
    return toys.adopted(toys.llama())


@cache
def draft() -> LoadedModel:
    return toys.adopted(toys.noisy_copy(toys.llama(), 0.1))


@cache
def truth() -> list[list[int]]:
    return [o.outputs[0].token_ids for o in LLM(target(), max_num_seqs=1).generate(PROMPTS, GREEDY)]


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["echelon", "bench", *map(str, arguments)])
    capsys.readouterr()
    code: Any = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return int(code or 0), out.out, out.err


# phases of a run


@pytest.mark.parametrize("method", methods_of(DRAFTING, ["unpadded", "padded"]))
def test_decoding_is_every_step_that_reads_no_prompt(method: DecodingMethod) -> None:
    """In a static batch: all but the first step, which reads the prompts of target and draft model, and emits a token or more a row."""
    llm = LLM(target(), method.config, draft(), max_num_seqs=5, refill=False, **STRATEGY_SETTINGS[method.strategy])
    first: list[int] = []
    recorder = Recorder(llm.stats)

    def on_step() -> None:
        recorder()
        first.append(llm.stats.num_emitted_tokens)

    llm.generate(PROMPTS, GREEDY, on_step=on_step)
    assert recorder.whole["tokens"] == 5 * 12
    assert recorder.decode["tokens"] == 5 * 12 - first[0]
    assert recorder.decode["steps"] == recorder.whole["steps"] - 1
    assert sum(recorder.decode[part] for part in SPLIT) == pytest.approx(recorder.decode["seconds"])
    assert all(recorder.decode[part] > 0.0 for part in SPLIT)
    assert 0.0 < recorder.decode["seconds"] < recorder.whole["seconds"]


def test_a_prompt_in_pieces_is_no_decoding() -> None:
    llm = LLM(target(), None, max_num_seqs=2, max_num_batched_tokens=5, refill=False)
    recorder = Recorder(llm.stats)
    llm.generate([PROMPTS[3], PROMPTS[3]], GREEDY, on_step=recorder)
    assert recorder.whole["steps"] - recorder.decode["steps"] > 66 // 5
    assert recorder.decode["fed"] == recorder.decode["tokens"]


@pytest.mark.parametrize("config", [None, *DRAFTING])
def test_prompts_read_once_give_the_same_text_in_every_strategy(config: dict[str, Any] | None) -> None:
    prefixes = read_prefixes(target(), PROMPTS)
    for strategy in STRATEGY_SETTINGS:
        llm = toys.watch(LLM(target(), config, draft(), max_num_seqs=5, refill=False, **STRATEGY_SETTINGS[strategy]))
        outputs, recorder = decode(llm, PROMPTS, GREEDY, prefixes)
        assert outputs == truth(), strategy
        assert recorder.whole["fed"] < sum(map(len, PROMPTS)) + llm.stats.num_draft_tokens + llm.stats.num_row_steps
        reading = int(config == DRAFTING[1])  # the draft model, which reads the prompts in the first step
        assert recorder.decode["steps"] == recorder.whole["steps"] - reading
        assert recorder.whole["tokens"] == 60
        toys.assert_all_blocks_free(llm)


def test_a_beginning_of_a_prefix_is_the_prefix_of_a_beginning() -> None:
    whole, short = read_prefixes(target(), [PROMPTS[3], PROMPTS[3][:20]])
    begun = whole.first(19)
    assert begun.tokens == short.tokens
    assert all(torch.equal(a, b) for a, b in zip(begun.keys + begun.values, short.keys + short.values, strict=True))


def test_prefilled_runs_and_framework_beside_ours() -> None:
    """All of them in one table; with prompts read already the same steps are run and counted, but for the first."""
    copies, law = {"method": "ngram", "num_speculative_tokens": 7}, AcceptanceHistogram.from_counts(HISTOGRAM, "here")
    methods = [DecodingMethod("plain", None)]
    methods += [DecodingMethod("replay", copies, s, partial(replay, law=law)) for s in ("padded", "unpadded")]
    prefixes = read_prefixes(target(), PROMPTS)
    others = [PrefilledRun(m, target(), None, prefixes, 64) for m in methods]
    others.append(FrameworkRun("transformers", toys.llama(), 5))  # type: ignore[arg-type]
    results = measure(target(), draft(), methods, PROMPTS, GREEDY, 5, 2, truth(), others=others, refill=False)
    assert [r.name for r in results] == ["plain", "replay, padded", "replay"] * 2 + ["transformers"]
    for r in results:
        assert (len(r.tokens_per_second), len(r.decode_tokens_per_second)) == (2, 2), r.name
        assert min(r.decode_tokens_per_second) > 0.0
        assert (r.num_identical, r.num_rows) == ((0, 0) if r.method == "replay" else (5, 5)), r.name
    for _, padded, unpadded in (results[:3], results[3:6]):
        assert 0.2 < padded.padded_input_share < 0.9 and 0.0 < padded.padded_kv_share < 1.0
        assert unpadded.padded_input_share == unpadded.padded_kv_share == 0.0 < unpadded.kv_bytes_touched
        assert len(unpadded.accepted_by_position) == 7 and set(unpadded.step_ms) == set(SPLIT)
    assert results[4].acceptance == results[5].acceptance  # replayed alike


def test_decoding_is_measured_from_steps_and_what_is_odd_is_said() -> None:
    (result,) = measure(target(), None, [DecodingMethod("plain", None)], PROMPTS, GREEDY, 2, 1, truth())
    assert result.decode_median > 0.0
    short = GREEDY.model_copy(update={"max_tokens": 1})
    (result,) = measure(target(), None, [DecodingMethod("plain", None)], PROMPTS, short, 2, 1, [t[:1] for t in truth()])
    assert result.decode_tokens_per_second == [0.0]
    assert result.num_identical == 5
    assert any("only 0% of the tokens" in note for note in result.notes)


def test_steps_without_drafts_for_a_fault_are_no_measurement_of_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}

    def measured() -> list[str]:
        (result,) = measure(target(), None, [DecodingMethod("n-grams", config)], PROMPTS, GREEDY, 2, 1, truth())
        assert result.num_identical == 5
        return result.notes

    assert not any("failed" in note for note in measured()) and tokens_a_step(target(), config, PROMPTS, 12, 0.0) >= 1.0
    monkeypatch.setattr(NgramDrafter, "propose", lambda *_: 1 / 0)
    assert any("since the drafter failed: raised" in note for note in measured())
    with pytest.raises(RuntimeError, match="the drafter failed \\(raised"):
        tokens_a_step(target(), config, PROMPTS, 12, 0.0)


def test_settings_of_drafters_are_named_by_what_they_say() -> None:
    given: list[dict[str, Any]] = [
        {"method": "ngram", "num_speculative_tokens": 5},
        {"method": "draft_model"},
        {"method": "draft_model", "num_speculative_tokens": 7, "confidence_threshold": 0.3},
        {"method": "eagle", "tree": "dynamic", "num_speculative_tokens": 24},
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    ]
    assert [m.name for m in methods_of(given, ["unpadded"])] == [
        "plain",
        "LLMA 5",
        "draft model auto",
        "draft model 7 at least 0.3",
        "eagle dynamic tree 24",
        "LLMA 5 #2",
    ]
    results = measure(target(), draft(), methods_of(given[:2], ["unpadded"]), PROMPTS, GREEDY, 5, 1, truth())
    assert [r.num_identical for r in results] == [5, 5, 5]
    assert results[2].adaptive["num_steps"] > 0
    assert "draft model auto" in adaptive_as_markdown(results)


def test_assisted_generation_of_the_framework() -> None:
    model, assistant = toys.llama(), toys.noisy_copy(toys.llama(), 0.1)
    runs = framework_runs(model, assistant, 1, {"num_speculative_tokens": 7, "prompt_lookup_max": 2}, 4)
    found = {r.name: r.run(PROMPTS[:2], GREEDY) for r in runs}
    assert list(found) == ["transformers", "transformers, prompt lookup", "transformers, assisted"]
    assert all(r.outputs == truth()[:2] for r in found.values())
    assert [r.name for r in framework_runs(model, assistant, 2, {"num_speculative_tokens": 7, "prompt_lookup_max": 2}, 4)] == [
        "transformers"
    ]


@pytest.mark.parametrize(("fastest", "dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_the_framework_is_not_measured_in_an_emulated_dtype(
    fastest: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framework, "fastest_dtype", lambda _: fastest)
    model, notes = in_fastest_dtype(toys.llama().to(torch.bfloat16))
    (run,) = framework_runs(model, None, 2, {}, 4, notes)
    done = run.run(PROMPTS[:2], GREEDY)
    assert model.dtype == dtype
    assert bool(run.result(2, [done]).notes) == (dtype == torch.float32)
    assert in_fastest_dtype(toys.llama())[1] == [], "float32 stays"


def test_memory_is_checked_first() -> None:
    with pytest.raises(ConfigError, match="take fewer"):
        check_memory(1 << 60, "this", torch.device("cpu"))
    with pytest.raises(ConfigError, match="take fewer"):
        PrefilledRun(DecodingMethod("plain", None), target(), None, [], 10**12).run(PROMPTS, GREEDY)


# replayed acceptance


@pytest.mark.parametrize("mean", [1.2, 2.0, 3.0, 4.2])
def test_a_histogram_is_moved_to_another_mean(mean: float) -> None:
    moved = rescaled(HISTOGRAM, mean)
    assert mean_tokens_per_step(moved) == pytest.approx(mean, abs=1e-9)
    assert [entry[:2] for entry in moved] == [entry[:2] for entry in HISTOGRAM]
    ratios = [m[2] / h[2] for m, h in zip(moved, HISTOGRAM, strict=True)]
    assert ratios[0] == pytest.approx(ratios[1])  # equally many accepted: equally tilted
    same = rescaled(HISTOGRAM, mean_tokens_per_step(HISTOGRAM))
    assert same[2][2] / same[0][2] == pytest.approx(8 / 30)


def test_no_histogram_has_a_mean_beyond_its_entries() -> None:
    for mean in (0.9, 1.0, 8.0):
        with pytest.raises(ConfigError, match="outside what was measured"):
            rescaled(HISTOGRAM, mean)


def test_a_draft_model_works_and_acceptance_is_replayed() -> None:
    llm = LLM(target(), default_methods()[2].config, draft(), max_num_seqs=5)
    replay(llm, AcceptanceHistogram.from_counts([[4, 1, 1], [4, 4, 1]], "here"))
    llm.generate(PROMPTS, GREEDY)
    full = {tuple(entry[:2]) for entry in llm.stats.histogram() if entry[0] == 4}
    assert full == {(4, 1), (4, 4)}
    assert llm.stats.draft.num_tokens > llm.stats.num_draft_tokens
    toys.assert_all_blocks_free(llm)


# arrivals


def test_arrivals_are_keyed_by_request() -> None:
    times = arrivals(400, 5.0, seed=3)
    assert times[:50] == arrivals(50, 5.0, seed=3)
    assert times != arrivals(400, 5.0, seed=4)
    assert times[0] == 0.0
    assert times[-1] / 399 == pytest.approx(0.2, rel=0.15)
    assert arrivals(9, 10.0, seed=3) == pytest.approx([t / 2 for t in times[:9]])


def test_latency_counts_from_arrival_and_nobody_sleeps() -> None:
    """Every step takes one second of the given clock; plain decoding of 12 tokens takes 12 of them."""
    ticks = iter(range(10_000))

    def clock() -> float:
        return float(next(ticks))

    alone = serve(LLM(target(), max_num_seqs=1), PROMPTS[:3], GREEDY, [0.0, 0.0, 100.0], clock)
    assert alone.last == [12.0, 24.0, 12.0]
    assert alone.first == [1.0, 13.0, 1.0]
    assert (alone.seconds, alone.num_tokens) == (112.0, 36)
    together = serve(LLM(target(), max_num_seqs=4), PROMPTS[:3], GREEDY, [0.0, 0.0, 3.5], clock)
    assert together.last == [12.0, 12.0, 12.5]  # the third waits for the end of the step it arrived in
    assert together.first == [1.0, 1.0, 1.5]


# workloads


@cache
def served() -> LLM:
    return LLM(load_model(str(TARGET), device="cpu"), max_num_seqs=1)


def test_workloads_from_files(tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    lines = [
        {"question_id": i, "category": "summarization" if i % 2 else "qa", "turns": [f"Summarize: text {i} do n't end"]} for i in range(6)
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    encode = served().inputs.encode
    assert workload("questions", served(), 3, 99, path=questions) == [encode(f"Summarize: text {i} do n't end") for i in (0, 2, 4)]
    assert workload("summaries", served(), 3, 99, path=questions) == [encode(f"text {i} don't end TL;DR:") for i in (1, 3, 5)]
    assert workload("summaries", served(), 1, 4, path=questions) == [encode("text 1 don't end TL;DR:")[-4:]]
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt": "def"}\n')
    assert workload("prompts", served(), 2, 99, path=tmp_path / "p.jsonl") == [[5, 6], encode("def")]


def test_workloads_of_held_out_source() -> None:
    tokenizer = served().target.tokenizer
    assert tokenizer is not None
    pieces = code_prompts(tokenizer, held_out_files(), 3, 64)
    assert workload("continue", served(), 3, 64, held_out_files()) == pieces
    assert sorted(map(len, workload("continue", served(), 3, 64, held_out_files(), is_ragged=True))) == [50, 57, 64]
    edits = edit_prompts(tokenizer, held_out_files(), 3, 64)
    for piece, edit in zip(code_prompts(tokenizer, held_out_files(), 3, 56), edits, strict=True):
        assert edit[:56] == piece
        assert len(edit) <= 64
        changed = "\n\n" + renamed(tokenizer.decode(piece))
        assert changed.startswith(tokenizer.decode(edit[56:]))
    assert renamed("alpha = self.alpha + beta(alpha)") == "alpha_new = self.alpha_new + beta(alpha_new)"
    assert ems_prompt(" It is n't so. ") == "It isn't so.  TL;DR:"


@pytest.mark.parametrize(
    ("name", "content", "words"), [("questions", "{}", "line 1"), ("songs", "", "continue"), ("prompts", None, "--input")]
)
def test_workloads_that_do_not_fit(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    path = None if content is None else tmp_path / "x.jsonl"
    if path is not None:
        path.write_text(content or "")
    with pytest.raises(ConfigError, match=words):
        workload(name, served(), 1, 8, path=path)


# commands


def test_throughput_writes_a_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = ["--batch-sizes", "2", "--num-prompts", 3, "--prompt-tokens", 16, "--max-tokens", 6, "--rounds", 1]
    chosen = ["--strategies", ",".join(STRATEGY_SETTINGS), "--speculative-config", json.dumps(DRAFTING[0]), "--workload", "edit"]
    code, out, err = run(capsys, monkeypatch, "throughput", *few, *chosen, "--output", tmp_path / "report")
    assert code == 0, err
    results = from_json(json.loads((tmp_path / "report" / "throughput.json").read_text()))
    names = {r.name for r in results}
    assert names >= {"plain", "LLMA 7", "transformers", *(f"LLMA 7, {s}" for s in STRATEGY_SETTINGS if s != "unpadded")}
    assert {r.group_rate is None for r in results if r.strategy == "same-length"} == {False}
    assert (tmp_path / "report" / "throughput.md").read_text().count(speeds_as_markdown(results)) == 1
    assert "| 2 | LLMA 7 |" in out
    for picture in ("throughput", "steps"):
        assert (tmp_path / "report" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run(capsys, monkeypatch, "throughput", "--strategies", "paddled")
    assert code == 2 and "padded-kv" in err


@pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("parameters", [0, 11_000_000])
def test_throughput_in_integers(
    parameters: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few = ["--batch-sizes", "2", "--num-prompts", 3, "--prompt-tokens", 16, "--max-tokens", 12, "--rounds", 1, "--parameters", parameters]
    integers = ["--quantization", "int8", "--kv-cache-dtype", "int8"]
    code, _, err = run(capsys, monkeypatch, "throughput", *few, *integers, "--strategies", "unpadded", "--output", tmp_path / "a.json")
    assert code == 0, err
    value = json.loads((tmp_path / "a.json").read_text())
    assert (value["quantization"], value["kv_cache_dtype"]) == ("int8", "int8")
    assert [(r.name, r.num_identical) for r in from_json(value)] == [("plain", 3), ("LLMA 7", 3), ("draft model 4", 3)]
    assert "transformers is left out: it does not run weights in int8, keys and values in int8" in err
    code, _, err = run(capsys, monkeypatch, "throughput", *few, *integers)
    assert code == 2 and "belongs to strategy = 'unpadded', not to 'padded'" in err


def test_latency_writes_a_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = ["--batch-sizes", "1,2", "--num-prompts", 4, "--prompt-tokens", 16, "--max-tokens", 4, "--loads", "0.8"]
    code, out, err = run(capsys, monkeypatch, "latency", *few, "--speculative-config.method", "ngram", "--output", tmp_path)
    assert code == 0, err
    results = json.loads((tmp_path / "latency.json").read_text())["results"]
    assert {(r["batch_size"], r["strategy"]) for r in results} == {(b, s) for b in (1, 2) for s in ("unpadded", "realign", "same-length")}
    assert all(0.0 < r["first_p50"] <= r["p50"] <= r["p90"] <= r["p99"] for r in results)
    assert len({r["requests_per_second"] for r in results if r["batch_size"] == 1}) == 1  # the same arrivals for all
    assert "P99" in out and (tmp_path / "latency.png").exists()
    assert run(capsys, monkeypatch, "latency", "--loads", "0")[0] == 2


FAKE = """
import json, sys
job = json.load(open(sys.argv[1]))
assert (job["mode"], job["max_tokens"], job["head_tokens"], job["batch_size"]) == ("plain", 5, 2, 2), job
outputs = [[0] * 5 for _ in job["prompts"]]
json.dump({"versions": {"vllm": "0.1"}, "outputs": outputs, "seconds": [3.0], "head_seconds": [1.0]}, open(sys.argv[2], "w"))
"""


def test_peers_run_in_an_environment_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm_worker.py").write_text(FAKE)
    monkeypatch.setattr(peers, "WORKERS", tmp_path)
    few = ["--modes", "plain", "--batch-sizes", 2, "--num-prompts", 4, "--prompt-tokens", 16, "--max-tokens", 5, "--rounds", 1]
    code, out, err = run(capsys, monkeypatch, "peers", "--vllm-python", sys.executable, *few, "--output", tmp_path / "peers.json")
    assert code == 0, err
    (found,) = json.loads((tmp_path / "peers.json").read_text())["peers"]
    assert (found["result"]["tokens_per_second"], found["result"]["decode_tokens_per_second"]) == ([20 / 3], [6.0])
    assert found["versions"] == {"vllm": "0.1"} and "not 0.32" in out
    assert "vllm, plain | 6.0 (6.7)" in out
    (tmp_path / "openvino_worker.py").write_text(FAKE)
    (tmp_path / "vllm_worker.py").write_text("raise SystemExit('no vllm here')")
    both = ["--vllm-python", sys.executable, "--openvino-python", sys.executable]
    code, _, err = run(capsys, monkeypatch, "peers", *both, *few, "--output", tmp_path / "some.json")
    assert code == 2 and "1 of 2 runs of other engines failed" in err and "batch 2, vllm, plain" in err and "no vllm here" in err
    some = json.loads((tmp_path / "some.json").read_text())
    assert [r["result"]["method"] for r in some["peers"]] == ["openvino, plain"] and some["ours"], "what was measured is kept"
    assert run(capsys, monkeypatch, "peers", "--vllm-python", tmp_path / "python", *few)[0] == 2
    (tmp_path / "vllm_worker.py").unlink()
    code, _, err = run(capsys, monkeypatch, "peers", "--vllm-python", sys.executable, *few)
    assert code == 2 and "benchmarks/workers" in err
    assert run(capsys, monkeypatch, "peers", *few)[0] == 2
    (tmp_path / "llama-server").touch()
    code, _, err = run(capsys, monkeypatch, "peers", "--llama-cpp", tmp_path, "--quantization", "int4", *few)
    assert code == 2 and "has no llama-quantize" in err


def test_workers_need_nothing_of_ours() -> None:
    for worker in ("vllm", "vllm_drafts", "openvino", "llama_cpp"):
        text = peers.Peer(worker, "python").worker.read_text("utf-8")
        assert "import echelon" not in text and "from echelon" not in text
        compile(text, worker, "exec")
    assert "echelon" not in (peers.WORKERS / "common.py").read_text("utf-8")
    (pinned,) = [
        n for n in (peers.WORKERS / "requirements-openvino.txt").read_text("utf-8").splitlines() if n.startswith("openvino-genai==")
    ]
    assert pinned.partition("==")[2].startswith(peers.PINNED["openvino-genai"])


def test_workers_repeat_a_job_and_write_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(peers.WORKERS))
    names = runpy.run_path(str(peers.WORKERS / "common.py"))
    asked: list[int] = []

    def generate(count: int) -> list[list[int]]:
        asked.append(count)
        return [[7] * count]

    found = names["measured"]({"head_tokens": 2, "max_tokens": 5, "rounds": 2}, generate, ["torch", "no-such-package"])
    assert asked == [2, 2, 5, 2, 5]
    assert (found["outputs"], len(found["seconds"]), len(found["head_seconds"])) == ([[7] * 5], 2, 2)
    assert found["versions"] == {"torch": torch.__version__}
    names["write_result"](str(tmp_path / "r.json"), found)
    assert names["read_job"](str(tmp_path / "r.json")) == found


# scripts


def test_benchmarks_are_resumable_and_write_the_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tables.main(["--small", "--output", str(tmp_path)]) == 0
    document = (tmp_path / "benchmarks.md").read_text()
    for words in (
        "unpadded / padded",
        "Where speculation loses",
        "EXSPEC",
        "P99",
        "exact match",
        "plots/gain.png",
        "| gain | LLMA | 2 |",
        "draft model, tree",
    ):
        assert words in document, words
    evidence = tmp_path / "evidence" / "benchmarks"
    cells = {p.stem.rsplit("-", 1)[0] for p in evidence.glob("*-*.json")}
    assert cells == {
        "table-opt",
        "table-pair",
        "table-confident",
        "heads",
        "rescaled",
        "gain",
        "realign-random",
        "realign-equal",
        "latency",
        "verified",
    }
    assert {p.suffix for p in (tmp_path / "plots").iterdir()} == {".png"}
    assert "This is a part" not in document
    capsys.readouterr()
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # they are drawn
    assert tables.main(["--small", "--output", str(tmp_path)]) == 0
    assert "21 of 21 cells are measured already" in capsys.readouterr().out
    assert (tmp_path / "benchmarks.md").read_text() == document
    for gone in ("table-opt-01", "table-opt-02", "gain-02", "equality", "verified-clover2", "realign-random-02", "realign-equal-02"):
        (evidence / f"{gone}.json").unlink()
    other = json.loads((evidence / "rescaled-02.json").read_text())
    (evidence / "rescaled-02.json").write_text(json.dumps(other | {"settings": {}}))
    cells = [cell.name for cell in tables.Tables(tables.SMALL, evidence).cells]
    part = write_document(tmp_path, cells, json.loads((evidence / "latency-02.json").read_text())["settings"]).read_text()
    assert "**This is a part**: 8 of 21 cells have not been measured" in part
    for words in (
        "  - `table-opt` at batch 1, 2\n",
        "  - `rescaled` at batch 2\n",
        "  - `equality`\n",
        "  - `verified-clover2`\n",
        "P99",
        "EXSPEC",
    ):
        assert words in part, words


def test_a_cell_that_fails_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {"results": []}
    outcomes: list[Any] = [ZeroDivisionError("no steps"), KeyboardInterrupt()]

    def measured() -> dict[str, Any]:
        if outcomes:
            raise outcomes.pop(0)
        return found

    monkeypatch.setattr(tables.Tables, "cells", [Cell("one", measured, 1.0), Cell("two", lambda: found, 2.0)])
    asked = ["--small", "--output", str(tmp_path)]
    assert tables.main(asked) == 1
    assert "not measured: `one`: ZeroDivisionError: no steps" in (tmp_path / "benchmarks.md").read_text()
    assert tables.main(asked) == 130  # stopped in the first cell; the second is there
    assert "0 of 2" in capsys.readouterr().out.split("wrote")[0]
    assert tables.main(asked) == 0
    assert "1 of 2 cells are measured already" in capsys.readouterr().out


def test_a_record_of_other_inputs_is_measured_again(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def run(inputs: dict[str, Any]) -> Any:
        cell = Cell("one", lambda: seen.append(inputs) or {"found": len(seen)}, inputs=inputs)  # type: ignore[func-returns-value]
        return run_cells([cell], Records(tmp_path), {}, lambda *_: True)["one"]

    assert run({}) == run({}) and "inputs" not in run({})
    assert run({"eagle": "a"})["inputs"] == {"eagle": "a"}
    assert run({"eagle": "a"})["found"] == 2
    assert [run({"eagle": "b"})["found"], run({})["found"]] == [3, 4]


def test_a_cell_that_fails_leaves_what_had_been_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under other settings, say, or on another machine."""
    seen: list[str] = []

    def run(measured: Any, is_current: bool = False) -> Any:
        records = Records(tmp_path)
        return run_cells([Cell("one", measured)], records, {}, lambda *_: is_current, on_record=lambda name, _: seen.append(name))["one"]

    def failing() -> Any:
        raise ConfigError("there is no trained head")

    assert "failed" in run(failing) and "failed" in Records(tmp_path).read()["one"], "nothing had been measured"
    assert run(lambda: {"found": 1})["found"] == 1
    assert "failed" in run(failing), "whoever asked is told"
    assert Records(tmp_path).read()["one"]["found"] == 1
    assert "the record that there was of it stays" in capsys.readouterr().out
    assert seen == ["one", "one"]


def test_heads_and_questions_are_inputs_where_they_are_not_those_that_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "TRAINED", tmp_path)
    assert workloads.trained_heads(["eagle", "medusa"]) == {}
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "model.safetensors").write_bytes(b"weights")
    assert list(workloads.trained_heads(["eagle", "medusa"])) == ["medusa"]
    file = tmp_path / "question.jsonl"
    assert other_questions(None) == other_questions(file) == {}
    file.write_text("{}")
    assert list(other_questions(file)) == ["questions"]
    monkeypatch.setattr(questions, "SPEC_BENCH", other_questions(file)["questions"])
    assert other_questions(file) == {}


def test_the_document_says_where_speculation_loses() -> None:
    def result(method: str, strategy: str, speed: float) -> dict[str, Any]:
        return {**vars(ThroughputResult(method, 8, [speed], 1.0, 0.0, 0, 0, strategy=strategy, decode_tokens_per_second=[speed]))}

    def said(padded: float, unpadded: float) -> str:
        found = [result("plain", "unpadded", 10.0), result("LLMA", "padded", padded), result("LLMA", "unpadded", unpadded)]
        return findings({"table-pair-08": {"results": found}})

    assert "fastest strategy in 1 of 1" in said(5, 11) and "in 0 of 1 comparisons `unpadded` speculation" in said(5, 11)
    assert "padded by 20%" in said(6, 5) and "0.50 × plain" in said(6, 5)
    assert "`unpadded` over `padded` is 1.10 to 1.10 at batch 8 and 16 in 1 comparisons" in said(10, 11)


def test_the_script_of_ems_sd_on_a_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(ROOT / "scripts" / "opt_cnn_dailymail.py"))
    asked = names["parser"]().parse_args([])
    assert (asked.num_articles, asked.max_tokens, asked.sizes.split(",")[-1]) == (480, 128, "13b")
    lines = [json.dumps({"article": f"def add(a, b): return a + {i}. Is n't it?"}) for i in range(3)]
    (tmp_path / "articles.jsonl").write_text("\n".join(lines))
    few = ["--num-articles", "2", "--batch-sizes", "2", "--max-tokens", "4", "--rounds", "1"]
    models = ["--model", str(TARGET), "--draft-model", str(DRAFT), "--articles", str(tmp_path / "articles.jsonl")]
    assert names["main"]([*models, *few, "--output", str(tmp_path)]) == 0
    assert (
        f"--num-articles 2 --batch-sizes 2 --max-tokens 4 --rounds 1 --output {tmp_path}" in (tmp_path / "target/throughput.md").read_text()
    )
    results = from_json(json.loads((tmp_path / "target" / "throughput.json").read_text()))
    assert len(results) == 1 + 2 * 4 and all(r.num_identical == 2 for r in results if r.strategy == "unpadded")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert names["main"]([*models[:4], *few]) == 2
    assert "--articles" in capsys.readouterr().err


def test_a_curve_of_latencies_is_of_one_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A panel a drafter and load, each with plain decoding beside it."""
    drawn: dict[str, list[Any]] = {}
    monkeypatch.setattr("echelon.bench.plot.line_chart", lambda _path, panels, *_: drawn.update(panels))
    names = [("plain", "unpadded"), ("LLMA 7", "unpadded"), ("LLMA 7", "realign"), ("draft model 4", "unpadded")]
    results = [
        Latency(method, strategy, batch, 0.8, 1.0, 1.0, 1.0 * i, 1.5 * i, 2.0 * i, 0.1, 0.2)
        for i, (method, strategy) in enumerate(names, 1)
        for batch in (1, 2)
    ]
    latency_charts(tmp_path, results)
    lines = {panel: {curve.name: curve.points for curve in curves} for panel, curves in drawn.items()}
    assert list(lines) == [f"{drafter}, arrivals at 80% of capacity" for drafter in ("LLMA 7", "draft model 4")]
    assert all([batch for batch, _ in points] == [1, 2] for curves in lines.values() for points in curves.values())
    assert {name: points[0][1] for name, points in lines["LLMA 7, arrivals at 80% of capacity"].items()} == {
        "unpadded, P50": 2e3, "unpadded, P99": 4e3, "realign, P50": 3e3, "realign, P99": 6e3, "plain decoding, P50": 1e3,
        "plain decoding, P99": 2e3,
    }  # fmt: skip


def test_other_engines_copy_as_ours_does() -> None:
    """What is named first, as of a draft model."""
    folder, length, lookup = ThroughputOptions(engine={}, speculative_config=None).elsewhere
    assert (folder, length, lookup["num_speculative_tokens"], lookup["prompt_lookup_max"]) == (str(DRAFT), 4, 7, 2)
    configs = [
        '{"method": "ngram", "num_speculative_tokens": "auto", "prompt_lookup_max": 4}',
        '{"model": "M", "num_speculative_tokens": 3}',
    ]
    folder, length, lookup = ThroughputOptions(engine={}, speculative_config=configs).elsewhere
    assert (folder, length, lookup["num_speculative_tokens"], lookup["prompt_lookup_max"]) == ("M", 3, 7, 4)
