"""`echelon plan` for devices that are not here, and the page that is written from such plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.cells import Records
from benchmarks.on_paper_document import write_on_paper
from benchmarks.paper_replicas import HashRing, loads_of
from benchmarks.stages import ACCURACIES, lengths, medusa_tokens, ranked_accuracies, static_share
from echelon.cli import main
from echelon.demo import TARGET

DOCS = Path(__file__).parents[2] / "docs"
DRAFTS = ["--speculative-config", '{"method":"eagle","tree":"dynamic","num_speculative_tokens":8}']


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["echelon", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_a_shape_on_stages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """12 layers of OPT on four devices of a table of one's own, with drafts; what it prints and its JSON say the same."""
    small = ["opt-125m", "--device", "rtx-4090", "-pp", "4", "--max-num-seqs", "4", *DRAFTS]
    status, out, _ = run(capsys, monkeypatch, *small, "--speculation")
    assert status == 0 and "opt-125m on 4 × rtx-4090, on paper" in out and "hidden states between stages" in out and "pays from" in out
    status, out, _ = run(capsys, monkeypatch, *small, "--json")
    found = json.loads(out)
    assert status == 0 and found["on_paper"] and [d["layers"] for d in found["devices"]] == [3] * 4
    assert found["fits"] and [line["rows"] for line in found["speeds"]] == [1, 2, 4]
    assert found["traffic"] == {"gathered": 0, "logits": 0, "hidden_states": 36 * 4 * 768 * 2, "tokens": 36}
    assert all(line["speculative"]["tokens_per_second"] > 0 for line in found["speeds"])


def test_a_folder_on_tensor_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run(capsys, monkeypatch, str(TARGET), "--device", "h100", "-tp", "2", "--max-num-seqs", "2")
    assert status == 0 and "2 × h100, on paper" in out and "in gathers" in out


def test_a_device_of_ones_own_that_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"memory_gb": 1.2, "read_gb": 10, "tflops": {"bfloat16": 1}, "link_gb": 1, "source": "mine"}
    (tmp_path / "devices.json").write_text(json.dumps({"mine": entry}), "utf-8")
    small = ["opt-125m", "--device", "mine", "--devices", str(tmp_path / "devices.json"), "--max-num-batched-tokens", "64"]
    status, out, err = run(capsys, monkeypatch, *small, "--max-num-seqs", "8", "--max-model-len", "1024")
    assert status == 1 and "opt-125m on 1 × mine" in out
    told = err.replace("\n", " ")
    assert "devices would do: --tensor-parallel-size " in told
    ranks, stages = (told.split(flag)[1].split()[0] for flag in ("--tensor-parallel-size ", "--pipeline-parallel-size "))
    flags = ["-tp", ranks, "-pp", stages, "--max-num-seqs", "8", "--max-model-len", "1024"]
    assert run(capsys, monkeypatch, *small, *flags)[0] == 0, "and they do"


def test_the_page_is_what_the_evidence_says(tmp_path: Path) -> None:
    records = Records(DOCS / "evidence" / "on_paper").read()
    assert set(records) == {"plans", "here", "stages", "scylla", "padding", "replicas"}
    written = write_on_paper(tmp_path, records).read_text("utf-8")
    assert written == (DOCS / "on_paper.md").read_text("utf-8")
    assert "**Nothing on this page was measured on several devices.**" in written


def test_the_goals_of_eight_stages() -> None:
    """As the engine runs them: at least the published ratios at batch 4 and 10, and growth from 1 to 10."""
    ours = next(iter(Records(DOCS / "evidence" / "on_paper").read()["stages"]["variants"].values()))
    gains = [s / p for p, s in zip(ours["plain"], ours["speculative"], strict=True)]
    assert gains[2] >= 28.8 / 14.2 and gains[4] >= 46.0 / 29.8
    assert ours["speculative"][4] / ours["speculative"][0] >= 46.0 / 5.7


def test_medusa_by_its_published_accuracies() -> None:
    for own, (first, five) in zip(ranked_accuracies(), ACCURACIES, strict=True):
        assert own[0] == pytest.approx(first) and sum(own[:5]) == pytest.approx(five, abs=1e-6)
        assert own == sorted(own, reverse=True)
    assert medusa_tokens(1) == pytest.approx(1.605)
    chances = lengths(43)
    assert sum(chances) == pytest.approx(1.0) and min(chances) >= 0.0
    assert sum(n * c for n, c in enumerate(chances)) + 1 == pytest.approx(medusa_tokens(43))
    shares = [static_share(rows, 43) for rows in (1, 2, 10)]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True)


def test_a_bounded_ring_keeps_its_bound_and_conversations_their_place() -> None:
    ring = HashRing(10)
    assert {ring.choose(key) for key in range(0, 1 << 64, 1 << 57)} <= set(range(10))
    assert ring.choose(7, [0] * 10) == ring.choose(7)
    full = [9 if r == ring.choose(7) else 0 for r in range(10)]
    assert ring.choose(7, full, 9) != ring.choose(7), "the next that has room"
    found = loads_of(10)
    assert found["hash, at most 1.25 of the share"][0] <= 1.25 + 1e-9
    assert found["hash, at most 1.25 of the share"][1] > 0.9 > found["the emptier of two"][1]
