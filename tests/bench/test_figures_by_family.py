"""Figures by family of instructions beside their goals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.families import environment_of, families_part, step_goal, verdicts
from echelon.ops import compiled


def step(tokens: int, milliseconds: float, reading: float, arithmetic: float, other: float = 1.0) -> dict[str, float]:
    return {
        "tokens": tokens,
        "tokens_per_row": 8,
        "context": 256,
        "milliseconds": milliseconds,
        "linear": milliseconds - other,
        "attention": 0.0,
        "other": other,
        "reading": reading,
        "arithmetic": arithmetic,
    }


@pytest.mark.parametrize(
    ("tokens", "reading", "arithmetic", "goal"),
    [(1, 60, 5, 1.25), (8, 60, 100, 1.45), (8, 100, 60, 1.45), (16, 60, 130, 1.25), (512, 60, 100, 1.15)],
)
def test_limits_that_lie_close_together_give_more_room(tokens: int, reading: float, arithmetic: float, goal: float) -> None:
    assert step_goal(step(tokens, 1.0, reading, arithmetic)) == goal


def test_figures_are_set_beside_their_goals(tmp_path: Path) -> None:
    where = {"environment": {"cpu": "a", "torch": "b", "transformers": "c", "commit": "d", "isa": "avx2", "threads": "2", "python": "3"}}
    records = {
        "steps_avx2": {"results": [step(1, 70, 60, 5), step(64, 900, 60, 500, other=30)]},
        "prompt_avx2": {"gap": 5.5},
        "sampling_avx2": {"nanoseconds": {"trained": {"32000": 1.4, "151936": 2.1}, "flat": {"32000": 5.9}}},
        "pass_avx2": {"milliseconds": 0.21},
        "draft_avx2": {"speedup": 2.0, "tokens_per_step": 3.0},
        "draft_generic": {"failed": "no time"},
    }
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(where | record))
    met = {v.what: v.is_met for v in verdicts(records, "avx2")}
    assert met == {
        "step of 1: times its limit": True,
        "step of 1: other, ms a layer": True,
        "step of 64: times its limit": False,
        "sampling, trained logits, ns a token of 32000, 151936 and place": False,
        "sampling, flat logits, ns a token of 32000 and place": True,
        "pass of the embedded draft model over one token, ms": True,
        "largest gap beside a prompt, plain steps": False,
        "draft model's speed-up over its tokens a step": True,
    }
    text = "\n".join(families_part(tmp_path))
    assert "### avx2" in text
    assert "### generic" not in text
    assert "| step of 64: times its limit | 1.80 | ≤ 1.25 | **no** |" in text
    assert families_part(tmp_path / "nothing") == []


@pytest.mark.skipif(not compiled.is_built(), reason="the compiled kernels are not built")
def test_every_family_that_is_offered_can_be_held_to() -> None:
    for family in compiled.offered_isas():
        words = [sys.executable, "-c", "from echelon.ops import compiled; print(compiled.isa())"]
        held = subprocess.run(words, env=os.environ | environment_of(family), capture_output=True, text=True, check=True)
        assert held.stdout.strip() == family
    assert environment_of("avx2")["ONEDNN_MAX_CPU_ISA"] == "AVX2"
