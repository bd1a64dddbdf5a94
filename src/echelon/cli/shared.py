"""What the verbs share: options, flags made from the fields of settings, and how values are read."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic_core import from_json
from rich.console import Console

from echelon.config import EngineConfig
from echelon.errors import ConfigError
from echelon.inputs import shown
from echelon.settings import Settings

SPECULATIVE = "--speculative-config"
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name of a causal language model (safetensors).")]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        SPECULATIVE,
        metavar="JSON",
        help='What drafts, e.g. `{"method":"ngram","num_speculative_tokens":7,"prompt_lookup_max":2}`; also dotted: '
        "`--speculative-config.method ngram`.",
    ),
]
RefillOption = Annotated[bool, typer.Option("--refill/--no-refill", help=EngineConfig.model_fields["refill"].description)]
errors = Console(stderr=True, soft_wrap=True)


class Flags:
    """The fields `names` of `settings` as flags, with their type, default and description; `defaults` replace the settings' own."""

    def __init__(self, settings: type[Settings], *names: str, **defaults: Any) -> None:
        self.names, self._fields, self._defaults = names, settings.model_fields, defaults

    def parameters(self) -> list[inspect.Parameter]:
        """Parameters as the command-line library reads them."""
        return [self._parameter(name) for name in self.names]

    def _parameter(self, name: str) -> inspect.Parameter:
        field = self._fields[name]
        kind, default, flag = _plain(field.annotation), self._defaults.get(name, field.default), "--" + name.replace("_", "-")
        if kind is bool and default:
            flag += f"/--no-{flag[2:]}"
        if get_origin(kind) is tuple:
            kind, default = list[str] | None, None
        elif _takes_word(kind):
            kind = str
        annotation = Annotated[kind, typer.Option(flag, help=field.description)]  # type: ignore[valid-type]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the flags say, as the settings take it."""
        return {name: self._value(name, given[name]) for name in self.names}

    def _value(self, name: str, value: Any) -> Any:
        kind = _plain(self._fields[name].annotation)
        if get_origin(kind) is tuple:
            return tuple(value or ())
        return number_or_auto(value, "--" + name.replace("_", "-")) if _takes_word(kind) else value


def with_flags(**groups: Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put flags in the place of a verb's parameters of these names; each of them is then a mapping from field to value."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def command(**given: Any) -> None:
            chosen = {name: flags.values(given) for name, flags in groups.items()}
            made = {field for flags in groups.values() for field in flags.names}
            verb(**chosen, **{name: value for name, value in given.items() if name not in made})

        parameters = []
        for p in inspect.signature(verb, eval_str=True).parameters.values():
            parameters += groups[p.name].parameters() if p.name in groups else [p.replace(kind=p.KEYWORD_ONLY)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _plain(kind: Any) -> Any:
    """A type without what pydantic notes on it."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, map(_plain, get_args(kind)))
    return kind


def _takes_word(kind: Any) -> bool:
    """A number or a word, such as "auto"."""
    return get_origin(kind) in (Union, types.UnionType) and any(get_origin(k) is Literal for k in get_args(kind))


def from_argument(text: str) -> Any:
    """JSON of an argument; `ValueError` for what is none. Bytes that are no UTF-8, which Python hands on as lone surrogates, are none."""
    return from_json(text.encode("utf-8", "backslashreplace"))


def number_or_auto(text: str, flag: str) -> int | str:
    """Bytes such as 2000000000 or 2e9, or "auto"."""
    if text == "auto":
        return text
    try:
        return int(float(text)) if "e" in text.lower() else int(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{flag} {shown(text)} is no number; give bytes such as 2000000000 or 2e9, or auto") from None


def speculative_mapping(text: str | None) -> dict[str, Any] | None:
    """What `--speculative-config` says."""
    if text is None:
        return None
    try:
        value = from_argument(text)
    except ValueError as error:
        raise ConfigError(f"{SPECULATIVE} is not JSON ({error}); quote it for the shell, or write {SPECULATIVE}.method ngram") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{SPECULATIVE} must be a JSON object such as " + '{"method":"ngram"}')
    return value
