"""The comparison with vLLM's drafts, with a stand-in for vLLM that says what we draft, or something else."""

from __future__ import annotations

import argparse
import copy
import json
import runpy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import eagle3_in_vllm
from echelon import ConfigError
from echelon.bench.peers import WORKERS
from echelon.demo import TARGET
from echelon.heads.checkpoints import build_head, save_head
from echelon.model.load.loading import load_plain

FEW = {"NUM_PROMPTS": 2, "PROMPT_TOKENS": 12, "MAX_TOKENS": 6}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, value in FEW.items():
        monkeypatch.setattr(eagle3_in_vllm, name, value)
    return eagle3_in_vllm


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    target, folder = load_plain(str(TARGET))[0].float(), tmp_path_factory.mktemp("head")
    save_head(build_head("eagle3", target, draft_vocab_size=100), folder, target)
    return folder


def asked(head: Path, folder: Path) -> argparse.Namespace:
    (folder / "python").touch()
    return argparse.Namespace(head=head, vllm_python=folder / "python", output=folder / "found.json")


def test_only_the_same_drafts_pass(script: ModuleType, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**changes: Any) -> tuple[int, dict[str, Any]]:
        """The script against a vLLM that says what we do, but for this."""
        monkeypatch.setattr(script, "run_worker", lambda *_: said | changes)
        code = script.main(asked(head, tmp_path))
        return code, json.loads((tmp_path / "found.json").read_text("utf-8"))

    ours = script.by_us(script.job(asked(head, tmp_path)))
    drafts = [[list(note.text), list(note.tokens)] for note in ours["drafts"]]
    monkeypatch.setattr(script, "by_us", lambda _: ours)
    said = ours | {"versions": {"vllm": "0.32"}, "drafts": drafts}
    code, found = run()
    assert code == 0 and found["num_equal"] == found["num_drafts"]["ours"] == len(drafts) > 4 and found["num_equal_texts"] == 2

    other = copy.deepcopy(drafts)
    other[1][1][1] += 1
    code, found = run(drafts=other)
    (difference,) = found["differences"]
    assert code == 1 and difference["place"] == 1 and difference["vllm"] - 1 == difference["ours"] == drafts[1][1][1]
    assert difference["margin"] == pytest.approx(ours["drafts"][1].margins[1])
    with monkeypatch.context() as wide:
        wide.setattr(script, "MARGIN", 1.01 * difference["margin"])
        code, found = run(drafts=other)
    assert code == 0 and len(found["ties"]) == 1 and not found["differences"]

    assert run(drafts=[[[0, *text], tokens] for text, tokens in drafts])[0] == 1  # nothing to compare
    assert run(drafts=[])[0] == 1


class Scheduler:
    """As much of vLLM's as is looked at."""

    def __init__(self) -> None:
        row = {"all_token_ids": [5, 6], "spec_token_ids": [], "is_finished": lambda: False}
        self.requests = {name: SimpleNamespace(**row) for name in ("drafted", "prompt half read", "finished")}
        self.requests["finished"].is_finished = lambda: True

    def update_draft_token_ids(self, drafts: Any) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if name in self.requests and name != "prompt half read":
                self.requests[name].spec_token_ids = tokens


def test_the_worker_notes_text_and_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WORKERS))
    notes = runpy.run_path(str(WORKERS / "vllm_drafts_worker.py"))["noted"](Scheduler)
    scheduler = Scheduler()
    names = ["finished", "gone", "drafted", "prompt half read"]
    scheduler.update_draft_token_ids(SimpleNamespace(req_ids=names, draft_token_ids=[[1], [2], [3, 4], [5]]))
    scheduler.requests["drafted"].all_token_ids += [3]
    assert notes == [([5, 6], [3, 4])]


def test_what_is_missing_is_named(script: ModuleType, head: Path, tmp_path: Path) -> None:
    for options, said in (
        (["--head", str(tmp_path)], "echelon train .* --method eagle3"),
        (["--head", str(head), "--vllm-python", str(tmp_path / "none")], "there is no vLLM at .*benchmarks/workers"),
    ):
        with pytest.raises(ConfigError, match=said):
            script.main(script.parser().parse_args(options))
