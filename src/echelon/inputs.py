"""Checks of all that comes from outside (numbers, text, token ids in any container, folders), and how messages show it."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from echelon.errors import ConfigError, EchelonError, OutputError, RequestError

Prompt = str | SequenceOf[int] | Mapping[str, Any]  # a mapping has `prompt`, a text, or `prompt_token_ids`
LARGEST = 2**31  # counts lie below


def valid_text(text: str) -> str:
    """Raise `ValueError` for a lone surrogate, which no encoder takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"no valid Unicode: a lone surrogate at character {error.start}; remove it") from None
    return text


def _number_of(key: object) -> object:
    """A key of a JSON object, which is text, as the number that it says."""
    return int(key) if isinstance(key, str) and key.removeprefix("-").isdecimal() else key


def _is_text(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


Text = Annotated[StrictStr, AfterValidator(valid_text)]
IdKey = Annotated[StrictInt, BeforeValidator(_number_of)]
_IDS: TypeAdapter[list[int]] = TypeAdapter(Annotated[list[StrictInt], Field(fail_fast=True)])


class TextPart(BaseModel):
    """A piece of a message; other kinds (images, audio) are refused. What prompts share is found without breakpoints."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: Any = None


class Message(BaseModel):
    """One turn of a conversation. Further keys are for the model's template."""

    model_config = ConfigDict(extra="allow")
    role: Text = Field(min_length=1)
    content: Text | list[TextPart] | None

    def for_template(self) -> dict[str, Any]:
        """With its content as one text, a line for each of its pieces, as in vLLM."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        return {**(self.model_extra or {}), "role": self.role, "content": content}


Conversation = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
_CONVERSATION: TypeAdapter[list[Message]] = TypeAdapter(Conversation)


def shown(value: object, quote: bool = True) -> str:
    """A value as a message shows it, in one line, however long or deep it is; `quote`: text stands in quotes."""
    if isinstance(value, str):
        cut = value if len(value) <= 120 else f"{value[:100]}… ({len(value):,} characters)"
        return repr(cut) if quote else repr(cut)[1:-1]
    try:
        text = _REPR.repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = f"<{kind_of(value)}>"
    return text if len(text) <= _REPR.maxother else text[: _REPR.maxother - 3] + "..."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut; else its kind."""
    text = str(error).strip()
    return shown(text.splitlines()[0], quote=False).replace("\\'", "'") if text else type(error).__name__


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80
_REPR.maxlevel = 3


def kind_of(value: object) -> str:
    """Its type with an article, for messages."""
    name = "None" if value is None else type(value).__name__
    return name if value is None else f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def real_path(location: SequenceOf[int | str], value: Any) -> list[int | str]:
    """The keys and indices of pydantic's `location` that lead into `value`: without the labels of a type's alternatives in between."""
    path: list[int | str] = []
    for part in location:
        is_index = isinstance(part, int) and isinstance(value, list | tuple) and 0 <= part < len(value)
        if is_index or (isinstance(value, Mapping) and part in value):
            path, value = [*path, part], value[part]
    return path


def field_path(path: SequenceOf[int | str]) -> str:
    """A path as Python writes it: `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def problems_of(failure: ValidationError, given: Any) -> dict[str, list[ErrorDetails]]:
    """Group the problems that pydantic reports on `given` by path; alternatives of one type stand together."""
    problems: dict[str, list[ErrorDetails]] = {}
    for problem in failure.errors(include_url=False):
        missing = [problem["loc"][-1]] if problem["type"] == "missing" else []
        problems.setdefault(field_path([*real_path(problem["loc"], given), *missing]), []).append(problem)
    return problems


def described(path: str, problems: SequenceOf[ErrorDetails], name: str = "", is_secret: bool = False) -> str:
    """Describe the problems of one field of `name`: its path, the value there and its limits. What is wrong with several values
    together shows none of them, nor does what is secret.
    """
    dot = "." if name and path and not path.startswith("[") else ""
    chosen = [p for p in problems if p["type"] == "value_error"] or problems  # a check of ours says more than "no list either"
    reason = " or ".join(dict.fromkeys(p["msg"].removeprefix("Value error, ") for p in chosen))
    value = "" if not path or is_secret or problems[0]["type"] == "missing" else f" = {shown(problems[0]['input'])}"
    where = f"{name}{dot}{path}{value}"
    return f"{where}: {reason}" if where else reason


def first_problem(failure: ValidationError, given: Any, name: str = "") -> str:
    """The first thing wrong with `given`; where a type has alternatives, with the one that reaches deepest."""
    problems = problems_of(failure, given)
    first = next(iter(problems))
    path = max((p for p in problems if p.startswith(first)), key=len)
    return described(path, problems[path], name)


def plain(value: Any) -> Any:
    """Numbers and arrays of NumPy and PyTorch as Python's own, their dtypes by name, paths as text; containers too, one level deep."""
    value = _plain_item(value)
    if type(value) in (list, tuple):
        return type(value)(_plain_item(v) for v in value)
    if type(value) is dict:
        return {_plain_item(k): _plain_item(v) for k, v in value.items()}
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """As settings call it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _plain_item(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def check_kind(field: str, value: object, kind: type[Any] | tuple[type[Any], ...], error: type[EchelonError] = ConfigError) -> None:
    """Raise `error` where an argument is of another kind."""
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise error(f"{field} is {kind_of(value)}; give {'an' if names[0] in 'AEIOUaeiou' else 'a'} {names}")


def check_callable(field: str, value: object, error: type[EchelonError] = RequestError) -> None:
    """Raise `error` where an argument is no function; `None` stands for none."""
    if value is not None and not callable(value):
        raise error(f"{field} is {kind_of(value)}; give a function or leave it out")


def name_of(model: Any, field: str = "model") -> str:
    """The folder or hub name that `model` says, a string or a path.

    Raises
    ------
    ConfigError  it is neither
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str) or not name or "\0" in name or not _is_text(name):
        what = shown(model) if isinstance(model, str | bytes) else kind_of(model)
        raise ConfigError(f"{field} is {what}; give a folder, a hub name such as 'org/model', or a model that `load_model` has loaded")
    return name


def token_ids(prompt: Any, name: str = "prompt") -> list[int]:
    """Token ids of a list, tuple or other sequence, of a NumPy array or a tensor with one dimension.

    Raises
    ------
    RequestError  it is something else, or an entry is no whole number
    """
    is_array = isinstance(prompt, np.ndarray | torch.Tensor)
    if is_array and prompt.ndim != 1:
        raise RequestError(f"{name} has the shape {list(prompt.shape)}; give the ids of one text, in one dimension and without padding")
    if not is_array and not _is_list(prompt):
        raise RequestError(f"{name} is {kind_of(prompt)}; give a string or a list of token ids")
    ids = prompt.tolist() if is_array else [t if type(t) is int else _plain_item(t) for t in prompt]
    try:
        return _IDS.validate_python(ids)
    except ValidationError as failure:
        raise RequestError(first_problem(failure, ids, name) + "; give token ids") from None


def prompts_of(given: Any) -> dict[str, Any]:
    """Prompts by the names that messages have for them. A string or a flat sequence of ids is one prompt; what it holds is not checked."""
    if _is_list(given) and not (len(given) > 0 and _is_number(given[0])):
        return {f"prompts[{i}]": prompt for i, prompt in enumerate(given)}
    return {"prompts": given}


def unwrapped(prompt: Any, name: str = "prompt") -> Any:
    """The text or the token ids of a prompt that is a mapping, as vLLM's are; anything else as it is.

    Raises
    ------
    RequestError  the mapping has neither, or something besides
    """
    if not isinstance(prompt, Mapping):
        return prompt
    given = {key for key, value in prompt.items() if value is not None}
    if not given or not given <= {"prompt", "prompt_token_ids"}:
        raise RequestError(f"{name} has the keys {shown(sorted(map(str, given)))}; give a mapping with 'prompt' or 'prompt_token_ids'")
    return prompt["prompt_token_ids"] if "prompt_token_ids" in given else prompt["prompt"]


def _is_list(value: object) -> bool:
    return isinstance(value, SequenceOf) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | complex | np.generic) or (isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 0)


def conversation(messages: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Messages with `role` and `content`, ready for a chat template.

    Raises
    ------
    RequestError  it is no list of messages; the error names the field
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"{name} is {kind_of(messages)}; give a list of messages such as {{'role': 'user', 'content': 'text'}}")
    given = [dict(m) if isinstance(m, Mapping) else m for m in messages]
    try:
        return [m.for_template() for m in _CONVERSATION.validate_python(given)]
    except ValidationError as failure:
        raise RequestError(first_problem(failure, given, name) + "; a message has a role and a content of text") from None


def conversations_of(messages: Any) -> dict[str, Any]:
    """Conversations by the names that messages of errors have for them. A list of messages is one; what it holds is not checked."""
    if isinstance(messages, list | tuple) and not (messages and not isinstance(messages[0], list | tuple)):
        return {f"messages[{i}]": conversation for i, conversation in enumerate(messages)}
    return {"messages": messages}


def check_fields(values: Any, error: type[EchelonError] = ConfigError) -> None:
    """Raise `error` where a field of a dataclass is not what its annotation says."""
    hints = get_type_hints(type(values), include_extras=True)
    for field in fields(values):
        value = getattr(values, field.name)
        try:
            TypeAdapter(hints[field.name]).validate_python(value)
        except ValidationError as failure:
            raise error(first_problem(failure, value, f"{type(values).__name__}.{field.name}")) from None


def cache_folder() -> Path:
    """Where what is costly to find out again is kept for this user; nothing is lost with it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon"


def made_folder(path: Path, option: str) -> Path:
    """`path` as a folder that can be written.

    Raises
    ------
    OutputError  there is a file in its place, or no permission, or no space; `option` is what chooses another
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OutputError(f"{str(path)!r} is a file, and a folder is needed there; choose another {option}") from None
    except OSError as error:
        raise OutputError(f"cannot make the folder {str(path)!r}: {error.strerror}; choose another {option}") from error
    return path


def made_apart(path: Path, source: Path, option: str) -> Path:
    """The same for a folder that what is read from `source` is written to.

    Raises
    ------
    ConfigError  it is the source itself
    OutputError  as `made_folder`
    """
    if made_folder(path, option).resolve() == source.resolve():
        raise ConfigError(f"{str(path)!r} is SRC itself; choose another folder for {option}")
    return path


def write_text(path: Path, text: str, option: str) -> Path:
    """Write a file, in a folder that is made if need be.

    Raises
    ------
    OutputError  it cannot be written; `option` is what chooses another
    """
    made_folder(path.parent, option)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror}; make room, or choose another {option}") from error
    return path
