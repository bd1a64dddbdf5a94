"""Ordinary mistakes on the command line: one line that says what, which limit and what mends it, and exit 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echelon.cli import main
from echelon.demo import TARGET

T = str(TARGET)
DEEP = "[" * 3000
TRAIN = ["train", T, "--method", "medusa"]
MISTAKES: list[tuple[list[str], str]] = [
    ([*TRAIN, "--output", "file"], "'file' is a file, and a folder is needed there; choose another --output"),
    ([*TRAIN, "--output", "file/run"], "choose another --output"),
    (["train", T, "--method", "draft_model", "--output", "file"], "choose another --output"),
    ([*TRAIN, "--output", "run", "--data", "file", "--text", "a.txt"], "a folder is needed there; choose another --data"),
    ([*TRAIN, "--output", "run", "--text", "binary"], "cannot be read as UTF-8"),
    ([*TRAIN, "--output", "run", "--text", "folder"], "is a folder without a UTF-8 file; give text"),
    ([*TRAIN, "--output", "run", "--text", "nowhere"], "is no file or folder; give UTF-8 text"),
    ([*TRAIN, "--output", "run", "--fine-tuning-steps", "3"], "does not pretrain"),
    (["train", T, "--method", "draft_model", "--output", "run", "--batch-size", "3"], "leave --batch-size out"),
    ([*TRAIN, "--output", "run", "--text", "a.txt", "--data", "torn"], "data.json' cannot be read"),
    (["convert", "head", "file"], "choose another DST"),
    (["convert", "head", "head"], "is SRC itself"),
    (["inflate", T, "file"], "choose another DST"),
    (["inflate", T, "grown", "--parameters", "inf"], "write 500M"),
    (["inflate", T, "grown", "--parameters", "-5"], "write 500M"),
    (["inflate", T, "grown", "--num-layers", "0"], "greater than or equal to 1"),
    (["doctor", ""], "give a folder"),
    (["generate", T, "a", "--kv-cache-memory-bytes", "1e999"], "2e9"),
    (["generate", T, "a", "--kv-cache-memory-bytes", "9" * 5000], "2e9"),
    (["generate", T, "a", "--kv-cache-memory-bytes", "1e15"], "available on"),
    (["plan", T, "--device", "h1000"], "there is no device 'h1000'; known: a100-40gb"),
    (["plan", "llama-71b", "--device", "h100"], "no shape of that name; known shapes: llama-1.1b"),
    (["plan", "llama-70b"], "for a plan on paper name a device: a100-40gb"),
    (["plan", T, "-tp", "2"], "for a plan on paper name a device"),
    (["plan", T, "--device", "h100", "-tp", "3"], "tensor_parallel_size = 3 does not divide the 8 attention heads"),
    (["plan", T, "--device", "h100", "-pp", "5"], "pipeline_parallel_size = 5 is not between 1 and the model's 4 layers"),
    (["plan", T, "--device", "h100", "--devices", "file"], "devices cannot be read from 'file'"),
    (["plan", T, "--device", "h100", "--speculation"], "give --speculative-config too"),
    (["plan", T, "--device", "titan-rtx", "--dtype", "bfloat16"], "no speed in bfloat16; choose another --dtype (float32, float16)"),
    (["plan", T, "--device", "h100", "--speculative-config.method", "draft_model"], "give --tokens-per-step"),
    (["generate", T, "a", "-tp", "3"], "tensor_parallel_size = 3 does not divide the 8 attention heads"),
    (["generate", T, "a", "--tensor-parallel-size", "2", "--strategy", "padded"], "belongs to strategy = 'unpadded'"),
    (["generate", T, "a", "--speculative-config", DEEP], "not JSON"),
    (["generate", T, "a", "--speculative-config.method", DEEP], "SpeculativeConfig.method"),
    (["generate", T, "a", "--speculative-config", '{"method": "\udcff"}'], "not JSON"),
    (["generate", T, "a", "--speculative-config", '{"method":"draft_model","tree":"static","speculative_token_tree":"' + "(" * 9000 + '"}'],
     "no list of paths"),
    (["generate", T, "a", "--top-k", "9" * 30], "SamplingParams.top_k"),
    (["generate", T, "a", "--stop", "\udcff"], "SamplingParams.stop"),
    (["generate", T, "a", "--output", "folder"], "choose another --output"),
    (["generate", T, "a", "--output", "file/out.jsonl"], "choose another --output"),
    (["generate", "a\0b", "a"], "give a folder"),
    (["bench", "kernels", "--dtype", "x"], "known: bfloat16, float16, float32"),
    (["bench", "kernels", "--output", "file"], "choose another --output"),
    (["bench", "overhead", "--output", "file/x.json"], "choose another --output"),
    (["bench", "step", "--output", "file"], "choose another --output"),
    (["bench", "step", "--cost-table", "folder"], "choose another --cost-table"),
    (["bench", "step", "--speculative-config.method", "ngram"], "give --cost-table too"),
    (["bench", "step", "--cost-table", "t.json", "--output", "folder"], "leave --output out"),
    (["bench", "serve", "--output", "file/x.json"], "choose another --output"),
    (["bench", "serve", "--base-url", "http://localhost:abc"], "is no address"),
    (["verify", T, "--speculative-config.method", "ngram", "--speculative-config.method", "eagle"], "method is given twice"),
    (["bench", "serve", "--input", "chat.jsonl"], "row 0 of the input has no text; give it `prompt` or `turns`"),
    (["bench", "serve", "--input", "broken.jsonl"], "line 1: no JSON"),
    ([*TRAIN, "--output", "folder/run", "--text", "folder"], "where the run writes its own files"),
    (["bench", "throughput", "--output", "file"], "choose another --output"),
    (["bench", "latency", "--output", "file"], "choose another --output"),
    (["bench", "peers", "--output", "file"], "choose another --output"),
    (["bench", "throughput", "--workload", "questions", "--input", "binary"], "UTF-8"),
    (["bench", "throughput", "--workload", "questions", "--input", "nowhere"], "check the path"),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with everything that can be confused: a file, a folder, bytes that are no text, the head of nobody."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("a.txt").write_text("x = 1\n" * 2000)
    Path("binary").write_bytes(b"\xff\xfe\x00")
    for folder in ("folder", "torn", "head"):
        Path(folder).mkdir()
    Path("torn/data.json").write_text("{torn")
    Path("torn/tokens.npz").write_bytes(b"")
    Path("head/config.json").write_text("{}")
    Path("chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    Path("broken.jsonl").write_text('{"prompt": "a"\n')
    Path("head/pytorch_model.bin").write_bytes(b"")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("arguments", "words"), MISTAKES, ids=[" ".join(a)[-40:].replace("\0", "").replace("\udcff", "") for a, _ in MISTAKES]
)
def test_ordinary_mistakes_are_one_line_that_says_what_mends_them(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["echelon", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in said and "Traceback" not in said, said[-500:]
