"""Of every causal model of `transformers`: what docs/models.md says of it is so, and nothing served is wrong.

`make test` examines a sample; PROVE=1 all 191 in both dtypes (`-k` takes a model type or a dtype; about 15 minutes of one core).
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import transformers

import census
import toys
from echelon.errors import Refusal

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "docs" / "evidence" / "census.json").read_text("utf-8"))
SAMPLE = [
    ("llama", "float32"),
    ("gemma3", "float32"),  # built with its vision tower
    ("glm4_moe", "float32"),  # a router with weights of its own
    ("jetmoe", "float32"),
    ("phimoe", "bfloat16"),
    ("gpt2", "bfloat16"),
    ("bert", "float32"),
    *((name, "float32") for name in ("mamba", "bloom", "bart", "llama4_text", "doge", "xlnet", "musicgen", "lfm2", "deepseek_v32")),
]
ALL = [(name, dtype) for name in census.NAMES for dtype in census.DTYPES]
is_same_release = transformers.__version__ == RECORD["transformers"]


@pytest.mark.parametrize(("name", "dtype"), ALL if toys.PROVE else SAMPLE)
def test_models_are_served_exactly_or_refused_for_a_reason(name: str, dtype: str) -> None:
    finding = census.examine(name, dtype)
    assert finding.verdict in {"served", *(r.name for r in Refusal)}, finding.detail
    if is_same_release:
        assert finding.verdict == RECORD["models"][name][dtype], finding.detail


def test_the_table_of_models_is_the_record_and_names_every_class() -> None:
    models = RECORD["models"]
    script = runpy.run_path(str(ROOT / "scripts" / "models.py"))
    assert (ROOT / "docs" / "models.md").read_text("utf-8") == script["document"](models, RECORD["transformers"])
    assert {v for m in models.values() for v in (m["float32"], m["bfloat16"])} <= {"served", *(r.name for r in Refusal)}
    if is_same_release:
        assert list(models) == census.NAMES
