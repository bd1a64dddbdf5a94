"""A drafting method and a head are each a file of their own and a line of the table: with these alone they generate, serve, train and
report. No other module is patched.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import servers
from toy_head import ToyHead

from echelon import LLM, ConfigError, SamplingParams, SpeculativeConfig
from echelon.bench.throughput import DecodingMethod, as_json, measure
from echelon.cli import main
from echelon.demo import DRAFT
from echelon.heads.checkpoints import load_head
from echelon.methods import METHODS, Can, DraftingMethod, of_head

PROMPTS = ["def main(argv):\n    return main(argv)\n\ndef main(", "for x in x: for x in"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
METHOD = {"method": "toy", "num_speculative_tokens": 3}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lines."""
    monkeypatch.setitem(METHODS, "toy", DraftingMethod("toy_method:build"))
    monkeypatch.setitem(METHODS, "toy_head", of_head("toy_head:ToyHead"))


def call(*arguments: object) -> int:
    sys.argv = ["echelon", *map(str, arguments)]
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture
def head(registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A head that the command has trained for two steps."""
    monkeypatch.setattr(sys, "argv", [])
    text = tmp_path / "text.py"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(900)))
    sizes = ("--steps", 2, "--every", 1, "--num-continuations", 8)
    assert call("train", DRAFT, "--method", "toy_head", "--output", tmp_path / "head", "--text", text, *sizes) == 0
    assert "holds the toy_head head" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "head" / "log.jsonl").read_text("utf-8").splitlines()]
    assert lines[-1]["step"] == 2 and len(lines[-1]["top1"]) > 1
    return tmp_path / "head"


def texts(llm: LLM) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY)]


def check(config: dict[str, Any]) -> None:
    """It generates and serves the text of plain decoding, and is reported."""
    target = servers.pair()[1]
    plain = texts(LLM(target, max_num_seqs=2))
    with LLM(target, config, max_num_seqs=2) as llm:
        assert texts(llm) == plain
        metrics = llm.get_counters()
        assert metrics["num_draft_tokens"] > 0 and not metrics["drafter_faults"]
        with servers.serving(llm) as running, running.client() as client:
            body = {"model": servers.MODEL, "prompt": PROMPTS, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
            assert [c["text"] for c in client.post("/v1/completions", json=body).json()["choices"]] == plain
            assert "spec_decode_num_draft_tokens" in client.get("/metrics").text
    prompts = [target.tokenizer.encode(p) for p in PROMPTS]  # type: ignore[union-attr]
    (result,) = measure(target, None, [DecodingMethod("mine", config)], prompts, GREEDY, 2, 1)
    assert result.num_identical == result.num_rows == 2
    assert as_json([result])["results"][0]["method"] == "mine"


@pytest.mark.usefixtures("registered")
def test_a_drafting_method_is_one_file_and_one_line() -> None:
    check(METHOD)
    assert call("generate", DRAFT, "a", "--max-tokens", 2, "--speculative-config", json.dumps(METHOD)) == 0
    assert METHODS["toy"].can == Can.CHAINS
    with pytest.raises(ConfigError, match=r"tree = 'dynamic' belongs to draft_model, medusa, .*; method 'toy' drafts chains"):
        SpeculativeConfig(method="toy", tree="dynamic")
    with pytest.raises(ConfigError, match=r"confidence_threshold = 0.5 needs a drafter with probabilities, and 'toy' has none"):
        SpeculativeConfig(method="toy", confidence_threshold=0.5)


def test_a_head_is_one_file_and_one_line(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"method": "toy_head", "model": str(head), "num_speculative_tokens": 4}
    check(config)
    check(config | {"tree": "dynamic"})
    assert isinstance(load_head(head, servers.pair()[1].model), ToyHead)
    capsys.readouterr()
    assert call("doctor", DRAFT, "--json", "--speculative-config", json.dumps(config)) == 0
    assert json.loads(capsys.readouterr().out)["head"].startswith("toy_head, ")


def test_an_unknown_method_names_those_of_the_table() -> None:
    with pytest.raises(ConfigError, match=r"SpeculativeConfig.method = 'toy': there is no such method; known: ngram, draft_model"):
        SpeculativeConfig(method="toy")
    assert call("train", DRAFT, "--method", "ngram", "--output", "/nowhere") == 2


def test_every_line_of_the_table_leads_to_what_it_names() -> None:
    for name, method in METHODS.items():
        assert callable(method.build), name
        assert (method.head is not None) == (method.needs == "head")
