"""Requests from files: one JSON object a line, one prompt a line, or Spec-Bench's questions; and what a file of results says of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, StrictFloat, StrictInt, ValidationError, model_validator
from pydantic_core import from_json

from echelon.errors import ConfigError, RequestError
from echelon.inputs import Conversation, Text, first_problem
from echelon.outputs import CompletionOutput, Logprob, RequestOutput
from echelon.sampling import SamplingParams

if TYPE_CHECKING:
    from echelon.llm import LLM

KEYS = ("prompt", "prompt_token_ids", "messages", "turns")


class Line(BaseModel):
    """What a line of a .jsonl file may say; it has one of `KEYS`, and other keys than these mean nothing."""

    id: Text | StrictInt | StrictFloat | None = None
    question_id: Text | StrictInt | StrictFloat | None = None
    prompt: Text = ""
    prompt_token_ids: Annotated[list[StrictInt], Field(fail_fast=True)] = []
    messages: Conversation = []
    turns: Annotated[list[Text], Field(min_length=1, fail_fast=True)] = []
    params: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _has_one_prompt(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError('not a JSON object; write one such as {"prompt": "text"}')
        if len(found := [key for key in KEYS if key in given]) != 1:
            raise ValueError(f"needs exactly one of {', '.join(KEYS)}, has {', '.join(found) or 'none'}")
        return given

    def request(self, index: int) -> Request:
        """The request that the line describes."""
        name = self.id if "id" in self.model_fields_set else self.question_id
        return Request(
            index,
            str(index if name is None else name),
            prompt=self.turns[0] if self.turns else self.prompt if "prompt" in self.model_fields_set else None,
            prompt_token_ids=self.prompt_token_ids if "prompt_token_ids" in self.model_fields_set else None,
            messages=[m.for_template() for m in self.messages] or None,
            params=self.params,
        )


@dataclass(frozen=True)
class Request:
    """One line: where it stood, its prompt in one of three forms, and its own sampling parameters; or why it is unusable."""

    index: int
    id: str
    prompt: str | None = None
    prompt_token_ids: SequenceOf[int] | None = None
    messages: list[dict[str, Any]] | None = None
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
            return llm.inputs.encode_chat(self.messages)
        return llm.inputs.encode(self.prompt or "")

    def sampled(self, llm: LLM, defaults: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
        """The prompt as token ids, and how it is sampled: by its own parameters, and by `defaults` where it has none.

        Raises
        ------
        RequestError  as `token_ids`; a parameter cannot be, or the model's context is too short
        """
        tokens, params = self.token_ids(llm), SamplingParams(**{**defaults, **self.params})
        llm.inputs.check_prompt(tokens, params)
        return tokens, params


def request_from_text(index: int, text: str) -> Request:
    """A request whose prompt is a text."""
    return Request(index, str(index), prompt=text)


def read_lines(path: Path) -> list[str]:
    """Lines of a UTF-8 file, with or without a byte-order mark; `ConfigError` for what cannot be read."""
    try:
        return path.read_text("utf-8-sig").split("\n")  # and not at other separators, which JSON allows inside a string
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error


def read_requests(path: Path, limit: int | None = None) -> list[Request]:
    """Requests of a .txt or .jsonl file, in order. A malformed line becomes a request with a `problem` that names its number."""
    numbered = [(n, line) for n, line in enumerate(read_lines(path), 1) if line.strip()][:limit]
    if not numbered:
        raise ConfigError(f"{str(path)!r} holds no prompt; give one a line")
    if path.suffix == ".jsonl":
        return [_parse(i, number, line) for i, (number, line) in enumerate(numbered)]
    if path.suffix == ".txt":
        return [request_from_text(i, line) for i, (_, line) in enumerate(numbered)]
    raise ConfigError(f"{str(path)!r} has the suffix {path.suffix!r}; prompts are read from .txt or .jsonl")


def _parse(index: int, number: int, line: str) -> Request:
    """A line's request. The parser has bounds on depth and on digits, and takes no lone surrogate."""
    given: Any = None
    try:
        given = from_json(line)
        return Line.model_validate(given).request(index)
    except ValidationError as failure:
        problem = first_problem(failure, given)
    except ValueError as error:
        problem = f"no JSON: {str(error).replace(' line 1 ', ' ')}; correct it"
    return Request(index, str(index), problem=f"line {number}: {problem}")


def output_line(request: Request, out: RequestOutput) -> dict[str, Any]:
    """What a file of results says of a request; with n > 1, `samples` has every continuation and the line itself the first."""
    if problems := [completion.error for completion in out.outputs if completion.error]:
        return {"index": request.index, "id": request.id, "error": problems[0]}
    samples = [_sample(completion) for completion in out.outputs]
    return {
        "index": request.index,
        "id": request.id,
        **({} if request.prompt is None else {"prompt": request.prompt}),
        **samples[0],
        **({"samples": samples} if len(samples) > 1 else {}),
        "seed": out.outputs[0].seed,
        "usage": {
            "prompt_tokens": len(out.prompt_token_ids),
            "completion_tokens": sum(len(completion.token_ids) for completion in out.outputs),
        },
        "metrics": asdict(out.metrics),
    } | ({} if out.prompt_logprobs is None else {"prompt_logprobs": [_logprobs(p or {}) for p in out.prompt_logprobs]})


def _sample(completion: CompletionOutput) -> dict[str, Any]:
    line = {"text": completion.text, "token_ids": completion.token_ids, "finish_reason": completion.finish_reason}
    return line | ({} if completion.logprobs is None else {"logprobs": [_logprobs(place) for place in completion.logprobs]})


def _logprobs(place: Mapping[int, Logprob]) -> dict[int, Any]:
    return {token: asdict(entry) for token, entry in place.items()}
