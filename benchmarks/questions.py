"""Spec-Bench's questions: 480 of six tasks, and what a model is given of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

from echelon import LLM, ConfigError

SPEC_BENCH = "4b6d33e79484f984"  # digest of its question.jsonl
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")  # one task in the harness's tables


@dataclass(frozen=True)
class Question:
    """A question with its turns, without a chat template, as the harness of EQSPEC asks it."""

    task: str
    turns: list[str]


def read_questions(path: Path | None) -> list[Question]:
    """The questions of a file `question.jsonl`.

    Raises
    ------
    ConfigError  no file is named, or it holds none
    """
    if path is None:
        raise ConfigError("this cell asks Spec-Bench's questions; name its question.jsonl with --questions")
    found = []
    for line in path.read_text("utf-8").splitlines():
        entry = json.loads(line)
        task = "mt_bench" if entry["category"] in MT_BENCH else entry["category"]
        found.append(Question(task, entry["turns"]))
    if not found:
        raise ConfigError(f"{path} holds no questions; take Spec-Bench's question.jsonl")
    return found


def other_questions(path: Path | None) -> dict[str, str]:
    """The digest of a file that is not Spec-Bench's own: an input of a cell that asks its questions."""
    digest = SPEC_BENCH if path is None or not path.exists() else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return {} if digest == SPEC_BENCH else {"questions": digest}


def encoded(llm: LLM, text: str, most: int) -> list[int]:
    """The last `most` tokens of a text."""
    return llm.inputs.encode(text)[-most:]


def spread(questions: SequenceOf[Question], count: int) -> list[Question]:
    """So many of them at most, evenly apart: all tasks are among them."""
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]
