"""Requests from files: one JSON object a line, one prompt a line, or Spec-Bench's questions."""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from echelon.api import LLM

KEYS = ("prompt", "prompt_token_ids", "messages", "turns")


@dataclass(frozen=True)
class Request:
    """One line: where it stood, its prompt in one of four forms, and its own sampling parameters; or why it is unusable."""

    index: int
    id: str
    prompt: str | None = None
    prompt_token_ids: SequenceOf[int] | None = None
    messages: list[dict[str, str]] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def token_ids(self, llm: LLM) -> list[int]:
        """The prompt as token ids.

        Raises
        ------
        RequestError  the line is unusable, or the model lacks the tokenizer or chat template for it
        """
        if self.problem is not None:
            raise RequestError(self.problem)
        if self.prompt_token_ids is not None:
            return list(self.prompt_token_ids)
        if self.messages is not None:
            return llm.encode_chat(self.messages)
        return llm.encode(self.prompt or "")


def request_from_text(index: int, text: str) -> Request:
    return Request(index, str(index), prompt=text)


def read_requests(path: Path, limit: int | None = None) -> list[Request]:
    """Requests of a .txt or .jsonl file, in order. A malformed line becomes a request with a `problem` that names its number."""
    try:
        lines = path.read_text("utf-8").split("\n")  # and not at other separators, which JSON allows inside a string
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()][:limit]
    if not numbered:
        raise ConfigError(f"{str(path)!r} holds no prompt; give one a line")
    if path.suffix == ".jsonl":
        return [_parse(i, number, line) for i, (number, line) in enumerate(numbered)]
    if path.suffix == ".txt":
        return [request_from_text(i, line) for i, (_, line) in enumerate(numbered)]
    raise ConfigError(f"{str(path)!r} has the suffix {path.suffix!r}; prompts are read from .txt or .jsonl")


def _parse(index: int, number: int, line: str) -> Request:
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return _build(index, value)
    except ValueError as error:
        return Request(index, str(index), problem=f"line {number}: {error}")


def _build(index: int, value: dict[str, Any]) -> Request:
    """A request from a parsed line; `ValueError` says what is wrong with it."""
    given = [key for key in KEYS if key in value]
    if len(given) != 1:
        raise ValueError(f"needs exactly one of {', '.join(KEYS)}, has {', '.join(given) or 'none'}")
    name = str(value.get("id", value.get("question_id", index)))
    params = value.get("params", {})
    if not isinstance(params, dict):
        raise ValueError("params must be an object of sampling parameters")
    content = value[given[0]]
    if given[0] == "prompt" and isinstance(content, str):
        return Request(index, name, prompt=content, params=params)
    if given[0] == "turns" and isinstance(content, list) and content and isinstance(content[0], str):
        return Request(index, name, prompt=content[0], params=params)
    if given[0] == "prompt_token_ids" and isinstance(content, list) and all(type(t) is int for t in content):
        return Request(index, name, prompt_token_ids=content, params=params)
    if (
        given[0] == "messages"
        and isinstance(content, list)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in content)
    ):
        return Request(index, name, messages=content, params=params)
    raise ValueError(f"{given[0]} has the wrong form")
