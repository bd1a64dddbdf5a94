"""The embedded models: a target and a draft model trained on Python source (`make pair` trains them again), and an EAGLE head for the
target (`make heads`)."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "pair"
TARGET = FOLDER / "target"
DRAFT = FOLDER / "draft"
EAGLE = FOLDER / "eagle"


def held_out_files() -> list[str]:
    """Files of the standard library that the pair has not been trained on, as paths below its folder."""
    return list(json.loads((FOLDER / "manifest.json").read_text("utf-8"))["held_out"])
