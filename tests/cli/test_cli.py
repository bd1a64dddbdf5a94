"""The command line as a user meets it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
import typer
from commands import Run, in_process
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

from echelon import LLM, ConfigError, EngineConfig
from echelon.bench import kernels
from echelon.cli import app, join_dotted
from echelon.demo import DRAFT, TARGET
from echelon.heads.checkpoints import build_head, save_head
from echelon.model.load.loading import load_plain
from echelon.ops import compiled

SPECULATIVE = '{"method":"ngram","num_speculative_tokens":7,"prompt_lookup_max":2}'


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return in_process(capsys, monkeypatch)


def test_the_installed_command_runs() -> None:
    done = subprocess.run([Path(sys.executable).parent / "echelon", "--help"], capture_output=True, text=True, check=True)
    assert "generate" in done.stdout


LOADED = """
import sys
sys.argv = ["echelon", "--help"]
from echelon.cli import main
try:
    main()
except SystemExit:
    sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""


def test_help_loads_no_framework() -> None:
    subprocess.run([sys.executable, "-c", LOADED], capture_output=True, check=True)


def test_help_lists_every_verb_as_it_describes_itself() -> None:
    whole: Any = typer.main.get_command(app)
    said = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).stdout.split())
    for name, verb in whole.commands.items():
        assert verb.help.split("\n\n")[0].replace("\n", " ").replace("`", "") in said, name


def lines(path: Path) -> list[dict[str, Any]]:
    """Rows of an output file, in the order of the input."""
    _, *rows = map(json.loads, path.read_text("utf-8").rstrip("\n").split("\n"))
    return sorted(rows, key=lambda row: row["index"])


def test_generate_with_and_without_speculation_writes_the_same_text(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "prompt": "def main(argv):\n"},
        {"prompt_token_ids": [300, 301, 302], "params": {"max_tokens": 5}},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"question_id": 81, "turns": ["class A:\u2028\n", "again"]},
    ]
    source.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    plain = run("generate", TARGET, "--input", source, "--output", tmp_path / "plain.jsonl", "--max-tokens", 24)
    assert plain.returncode == 0, plain.stderr
    drafted = run(
        "generate", TARGET, "--input", source, "--output", tmp_path / "drafted.jsonl", "--max-tokens", 24, "--json",
        "--speculative-config", SPECULATIVE,
    )  # fmt: skip
    assert drafted.returncode == 0, drafted.stderr
    summary = json.loads(drafted.stdout)
    assert summary["num_draft_tokens"] if "num_draft_tokens" in summary else summary["tokens_per_step"] > 1.0
    one, two = lines(tmp_path / "plain.jsonl"), lines(tmp_path / "drafted.jsonl")
    assert [r["token_ids"] for r in one] == [r["token_ids"] for r in two]
    assert [r["id"] for r in one] == ["a", "1", "2", "81"]
    assert [r["usage"]["completion_tokens"] for r in one] == [24, 5, 24, 24]
    assert set(one[0]) == {"index", "id", "prompt", "text", "token_ids", "finish_reason", "seed", "usage", "metrics"}


def test_bad_lines_are_reported_and_the_others_run(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(
        '{"prompt": "import os"}\n{"prompt": \n{"prompt": 3}\n{"prompt": "a", "messages": []}\n'
        '{"prompt": ""}\n{"prompt": "x", "params": {"top_p": 7}}\n{"prompt_token_ids": [99999]}\n'
    )
    done = run("generate", TARGET, "--input", source, "--output", tmp_path / "out.jsonl", "--max-tokens", 4)
    assert done.returncode == 3
    rows = lines(tmp_path / "out.jsonl")
    assert [("error" in r) for r in rows] == [False] + [True] * 6
    for row, words in zip(rows[1:], ("line 2", "line 3", "exactly one", "empty", "top_p", "vocabulary"), strict=True):
        assert words in row["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "./nowhere", "a"], "does not exist"),
        (["generate", TARGET], "--input"),
        (["generate", TARGET, "--input", "missing.jsonl"], "missing.jsonl"),
        (["generate", TARGET, "a", "--speculative-config", "{method"], "not JSON"),
        (["generate", TARGET, "a", "--speculative-config.method", "nrgam"], "ngram"),
        (["generate", TARGET, "a", "--temperature", "-1"], "temperature"),
        (["generate", TARGET, "a", "--max-model-len", "5000"], "2048"),
        (["generate", TARGET, "a", "--kv-cache-memory-bytes", "lots"], "2e9"),
        (["generate", TARGET, "a", "--strategy", "padded", "--grouping", "same_length"], "realign"),
        (["generate", TARGET, "a", "--strategy", "staircase"], "unpadded"),
        (["inflate", TARGET, "/tmp/never", "--width", "3"], "power of two"),
        (["plan", "./nowhere", "--memory", "8GiB"], "does not exist"),
        (["plan", TARGET, "--memory", "8 G"], "memory"),
        (["plan", TARGET, "--memory", "-8GiB"], "memory"),
        (["plan", TARGET, "--memory", "nan"], "memory"),
        (["plan", TARGET, "--memory", "10MiB"], "give at least"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(run: Run, arguments: list[object], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_txt_input_and_printed_output(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("import os\n\nimport sys\n")
    done = run("generate", TARGET, "--input", source, "--max-tokens", 3, "--speculative-config.method", "draft_model",
               "--speculative-config.model", DRAFT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_strategies_write_the_same_text(run: Run) -> None:
    ways = [[], ["--strategy", "padded", "--pad", "kv", "--no-refill"], ["--strategy", "realign", "--grouping", "same_length"]]
    prompts = ["def main(argv):\n", "import os", "class A:\n"]
    texts = {run("generate", TARGET, *prompts, "--dtype", "float32", "--max-num-seqs", 2, "--max-tokens", 8, *w).stdout for w in ways}
    assert len(texts) == 1 and "\n" in texts.pop()


def test_dotted_keys_become_json() -> None:
    words = ["generate", "M", "--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=3"]
    assert join_dotted(words)[:3] == ["generate", "M", "--speculative-config"]
    assert json.loads(join_dotted(words)[3]) == {"method": "ngram", "num_speculative_tokens": 3}
    assert join_dotted(["a", "b"]) == ["a", "b"]
    for words in (["--speculative-config", "{}"], ["--speculative-config={}"]):
        with pytest.raises(ConfigError, match="are both given"):
            join_dotted(["--speculative-config.method", "ngram", *words])
        assert join_dotted(words) == words
    prompts = ["--", "- a prompt", "--speculative-config.method", "as text"]
    joined = ["M", "--speculative-config", '{"method": "ngram"}', *prompts]
    assert join_dotted(["M", "--speculative-config.method=ngram", *prompts]) == joined


def test_tokens_of_a_step_hold_every_row_unless_said_otherwise(run: Run) -> None:
    few = run("plan", TARGET, "--max-num-batched-tokens", 16)
    assert few.returncode == 2 and "max_num_batched_tokens = 16 is less than max_num_seqs = 64" in few.stderr.replace("\n", " ")
    assert run("plan", TARGET, "--max-num-seqs", 3000, "--max-model-len", 16, "--json").returncode == 0
    assert EngineConfig(max_num_seqs=3000).max_num_batched_tokens == 3000
    assert EngineConfig(max_num_seqs=30).max_num_batched_tokens == 2048


def test_as_many_prompts_are_run_as_asked_for(run: Run) -> None:
    done = run("generate", TARGET, "a", "b", "c", "--num-prompts", 1, "--max-tokens", 1, "--json")
    assert json.loads(done.stdout)["num_requests"] == 1


def test_doctor_reports(run: Run, tmp_path: Path) -> None:
    report = json.loads(run("doctor", DRAFT, "--json").stdout)
    assert {"torch", "cpu", "ragged_attention", "linear", "model", "same text"} <= set(report)
    assert "bitwise" in report["same text"] and report["acceptance"] == "exact"
    lossy = ["--speculative-config", '{"method":"ngram","acceptance":"typical"}']
    report = json.loads(run("doctor", DRAFT, "--json", *lossy).stdout)
    assert "LOSSY" in report["acceptance"] and "LOSSY" in report["same text"] and "bitwise" not in report["same text"]
    assert run("doctor", *lossy).returncode == 2
    assert run("doctor").returncode == 0


def test_doctor_says_whether_a_head_knows_the_model(run: Run, tmp_path: Path) -> None:
    plain = load_plain(str(DRAFT))[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_head(build_head("eagle", plain), tmp_path / "head", plain)
    config = json.dumps({"method": "eagle", "model": str(tmp_path / "head")})
    report = json.loads(run("doctor", DRAFT, "--json", "--speculative-config", config).stdout)
    assert report["head"].startswith("eagle, NO BETTER THAN CHANCE: ") and "bitwise" in report["same text"]


def test_inspect_names_architecture_layers_memory_and_drafters(run: Run, tmp_path: Path) -> None:
    done = run("inspect", TARGET, "--drafter", DRAFT, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["architecture"]["class"] == "LlamaForCausalLM"
    assert report["architecture"]["parameters"] == 10_752_512
    assert "echelon" in report["layers"]["attention"]
    words = {"Linear": "packed once", "LlamaRMSNorm": "rounded once", "LlamaForCausalLM": "the order of its parts"}
    assert all(word in report["layers"][name] for name, word in words.items())
    assert report["memory"]["KV per token"] == "1,024 bytes"
    assert report["drafters"][str(DRAFT)].startswith("yes: 9.5%")
    toys.llama().save_pretrained(tmp_path / "toy")
    other = run("inspect", TARGET, "--drafter", tmp_path / "toy")
    assert other.returncode == 1
    assert "no: " in other.stdout


def test_a_draft_model_in_integers_is_one(run: Run, tmp_path: Path) -> None:
    """And one that is not served ends no report."""
    assert run("quantize", DRAFT, tmp_path / "integers").returncode == 0
    done = run("inspect", TARGET, "--drafter", tmp_path / "integers", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["drafters"][str(tmp_path / "integers")].startswith("yes: "), done.stdout
    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)).save_pretrained(tmp_path / "mamba")
    done = run("inspect", TARGET, "--drafter", tmp_path / "mamba", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["drafters"][str(tmp_path / "mamba")].startswith("no: ")


def test_inflate_spares_its_source(run: Run, tmp_path: Path) -> None:
    model = Path(shutil.copytree(DRAFT, tmp_path / "model"))
    (tmp_path / "link").symlink_to(model)
    before = (model / "config.json").read_bytes()
    done = run("inflate", model, tmp_path / "link")
    assert done.returncode == 2 and "is SRC itself; choose another folder for DST" in done.stderr.replace("\n", " ")
    assert (model / "config.json").read_bytes() == before
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    done = run("inflate", tmp_path / "gpt2", tmp_path / "grown")
    assert done.returncode == 2 and "inflate knows the families" in done.stderr


def test_inflate_writes_a_checkpoint(run: Run, tmp_path: Path) -> None:
    done = run("inflate", DRAFT, tmp_path / "big", "--width", 2, "--num-layers", 3)
    assert done.returncode == 0, done.stderr
    grown = AutoModelForCausalLM.from_pretrained(tmp_path / "big")
    assert (grown.config.hidden_size, grown.config.num_hidden_layers) == (256, 3)
    outputs = [run("generate", folder, "def main(", "--max-tokens", 12).stdout for folder in (DRAFT, tmp_path / "big")]
    assert outputs[0] == outputs[1] != ""


@pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")
def test_kernels_are_measured(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COLD_BYTES", 2**20)
    monkeypatch.setattr(kernels, "SECONDS", 0.0)
    done = run("bench", "kernels", "--shapes", "64x96", "--rows", "1,3", "--json", "--output", tmp_path / "kernels.json")
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "kernels.json").read_text())
    assert [(r["columns"], r["depth"], r["rows"]) for r in report["linear"]] == [(64, 96, 1), (64, 96, 3)]
    assert run("bench", "kernels", "--shapes", "64", "--rows", "1").returncode == 2
    assert run("bench", "kernels", "--shapes", "64x96", "--dtype", "int8").returncode == 2
    monkeypatch.setattr(compiled, "kernels", compiled.MISSING)
    assert run("bench", "kernels").returncode == 2


def test_a_family_of_instructions_that_the_machine_lacks_is_refused(run: Run) -> None:
    for verb in ("step", "kernels", "throughput"):
        done = run("bench", verb, "--isa", "mmx")
        assert done.returncode == 2
        assert "no instruction family mmx on this machine; it offers generic" in done.stderr


@pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")
def test_a_name_with_brackets_is_no_markup(run: Run) -> None:
    done = run("bench", "step", "./[/x]")
    assert done.returncode == 2 and "model folder './[/x]' does not exist" in done.stderr.replace("\n", " ")


def test_inspect_tells_cost_tables_apart(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for settings in ({"max_num_seqs": 2}, {"max_num_seqs": 16}, {"max_num_seqs": 2, "strategy": "padded"}):
        LLM(str(DRAFT), {"method": "ngram"}, **settings)
    names = sorted(json.loads(run("inspect", DRAFT, "--json").stdout)["costs"])
    assert len(names) == 3 and all(name.startswith("nothing drafts; up to ") for name in names)
    assert sum(", padded" in name for name in names) == 1 and len({name.split(";")[1] for name in names}) == 2
