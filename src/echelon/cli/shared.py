"""What the verbs share: options, flags made from the fields of settings, and how values are read."""

from __future__ import annotations

import functools
import inspect
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from echelon import LLM
from echelon.cli.words import SPECULATIVE, errors, from_argument
from echelon.config import RANKS, EngineConfig
from echelon.errors import ConfigError, UnknownHeadError
from echelon.heads.base import Head
from echelon.heads.checkpoints import load_head
from echelon.inputs import shown
from echelon.methods import METHODS
from echelon.model.load.loading import LoadedModel, check_vocabularies, load_model
from echelon.parallel.starting import serve_if_summoned
from echelon.settings import Quantization, Settings

SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp"}  # flags that have a second name, as vLLM has it
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")  # flags of verbs that write one text after another
ENGINE = (  # flags of verbs that run a model
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_model_len",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "memory",
    "gpu_memory_utilization",
    "dtype",
    "quantization",
    "device",
    "numerics",
    "enforce_eager",
)
BATCHED = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")  # of those that run many requests at once
PIPED_SECONDS = 10.0  # between lines of progress where stderr is no terminal
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name of a causal language model (safetensors).")]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        SPECULATIVE,
        metavar="JSON",
        help=f"What drafts: a method ({', '.join(METHODS)}) and its keys (docs/settings.md), e.g. "
        '`{"method":"ngram","num_speculative_tokens":7,"prompt_lookup_max":2}`; also dotted: `--speculative-config.method ngram`.',
    ),
]
ComparedOption = Annotated[
    list[str] | None,
    typer.Option(
        SPECULATIVE,
        metavar="JSON",
        help='What drafts, beside plain decoding, e.g. `{"method":"draft_model","model":"DIR"}`; may be repeated.',
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
RefillOption = Annotated[bool, typer.Option("--refill/--no-refill", help=EngineConfig.model_fields["refill"].description)]
QuantizationOption = Annotated[Quantization | None, typer.Option(help=EngineConfig.model_fields["quantization"].description)]


class Flags:
    """The fields `names` of `settings` as flags, with their type, default and description; `defaults` replace the settings' own."""

    def __init__(self, settings: type[Settings], *names: str, **defaults: Any) -> None:
        self._defaults, self._fields = defaults, {name: settings.model_fields[name] for name in names}
        self._kinds = {name: _plain(field.annotation) for name, field in self._fields.items()}

    def parameters(self) -> list[inspect.Parameter]:
        """Parameters as the command-line library reads them."""
        return [self._parameter(name, kind) for name, kind in self._kinds.items()]

    def _parameter(self, name: str, kind: Any) -> inspect.Parameter:
        field, flag = self._fields[name], _flag(name)
        default = self._defaults.get(name, field.default)
        if kind is bool and default:
            flag += f"/--no-{flag[2:]}"
        if get_origin(kind) is tuple:
            kind, default = list[str] | None, None
        elif _takes_word(kind):
            kind = str
        elif _takes_text(kind):
            kind = str | None
        flags = (flag, SHORT[name]) if name in SHORT else (flag,)
        annotation = Annotated[kind, typer.Option(*flags, help=field.description)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def taken(self, given: dict[str, Any], is_written: Callable[[str], bool]) -> dict[str, Any]:
        """What the flags say, as the settings take it; it is taken out of `given`. Where a budget of memory is among them, those
        that nobody has written are left out, unless their default is not the settings' own: what is left out is chosen to fit. A default
        number of tokens in a step holds a token of every row.
        """
        found = {name: given.pop(name) for name in self._kinds}
        said = [name for name in found if "memory" not in found or name in self._defaults or is_written(name)]
        values = {name: self._value(name, self._kinds[name], found[name]) for name in said}
        if "max_num_batched_tokens" in values and not is_written("max_num_batched_tokens"):
            values["max_num_batched_tokens"] = max(values["max_num_batched_tokens"], values.get("max_num_seqs", 1))
        return values

    def _value(self, name: str, kind: Any, value: Any) -> Any:
        if get_origin(kind) is tuple:
            return tuple(value or ())
        return number_or_auto(value, _flag(name)) if _takes_word(kind) else value


def verb(options: type[Any] | None = None, **groups: Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function. Its flags are the function's parameters, or the fields of the dataclass `options` that it takes;
    flags in `groups` stand in the place of a parameter of that name, which is then a mapping from field to value.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        takes, parameters = run if options is None else options, []
        hints = get_type_hints(takes, include_extras=True)
        for name, p in inspect.signature(takes).parameters.items():
            parameters += groups[name].parameters() if name in groups else [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[name])]

        parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

        @functools.wraps(run)
        def command(context: typer.Context, **given: Any) -> None:
            def is_written(name: str) -> bool:
                source = context.get_parameter_source(name)
                return source is not None and source.name != "DEFAULT"

            values = {name: flags.taken(given, is_written) for name, flags in groups.items()} | given
            serve_if_summoned({name: values.get("engine", {}).get(name, 1) for name in RANKS})
            run(**values) if options is None else run(options(**values))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


@contextmanager
def progress(total: int, first: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr with the time that is left, or where that is no terminal a line every PIPED_SECONDS; call it with what is new:
    `advance` or `completed`, `description`, a `note` beside it.
    """
    if not errors.is_terminal:
        now = time.monotonic()
        yield _ProgressLines(first, total, now, now).update
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=errors, transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task(first, total=total, note=""))


@dataclass
class _ProgressLines:
    """Progress for a file or a pipe."""

    description: str
    total: int
    started_at: float
    said_at: float
    completed: int = 0
    note: str = ""

    def update(self, advance: int = 0, **new: Any) -> None:
        """Take what is new, and say how far it is if it is time to."""
        for name, value in new.items():
            setattr(self, name, value)
        self.completed += advance
        now = time.monotonic()
        if now - self.said_at < PIPED_SECONDS:
            return
        self.said_at, spent = now, now - self.started_at
        left = f", about {spent * (self.total / self.completed - 1):.0f} s left" if self.completed else ""
        note = f" ({self.note})" if self.note else ""
        errors.print(escape(f"{self.description}: {self.completed}/{self.total} after {spent:.0f} s{left}{note}"), highlight=False)


def print_fitting(llm: LLM, known: Sequence[str]) -> None:
    """What was given up for a budget of memory, and the flags that say the same without one, of a verb that has flags for `known`."""
    for line in llm.fitting.lines(known) if llm.fitting is not None else ():
        errors.print(escape(line), highlight=False)


def drafter_in(name: str, target: LoadedModel) -> Head | LoadedModel:
    """The head, or else the draft model, in a folder or under a hub name; it can draft for `target`.

    Raises
    ------
    EchelonError  it cannot be read, or does not fit
    """
    with suppress(UnknownHeadError):  # what was read of it goes with the error, before the model is read
        return load_head(name, target.model)
    check_vocabularies(target, draft := load_model(name, device=target.device.type))
    return draft


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain(kind: Any) -> Any:
    """A type without what pydantic notes on it."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, map(_plain, get_args(kind)))
    return kind


def _takes_text(kind: Any) -> bool:
    """A number or text, such as "8GiB"."""
    return get_origin(kind) in (Union, types.UnionType) and {int, str} <= set(get_args(kind))


def _takes_word(kind: Any) -> bool:
    """A number or a word, such as "auto"."""
    return get_origin(kind) in (Union, types.UnionType) and {Literal, None} <= {
        get_origin(k) for k in get_args(kind) if k is not type(None)
    }


def number_or_auto(text: str, flag: str) -> int | str:
    """Bytes such as 2000000000 or 2e9, or "auto"."""
    if text == "auto":
        return text
    try:
        return int(float(text)) if "e" in text.lower() else int(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{flag} {shown(text)} is no number; give bytes such as 2000000000 or 2e9, or auto") from None


def speculative_mappings(texts: list[str] | None) -> list[dict[str, Any]]:
    """What each `--speculative-config` says."""
    return [mapping for text in texts or () if (mapping := speculative_mapping(text)) is not None]


def speculative_mapping(text: str | None) -> dict[str, Any] | None:
    """What `--speculative-config` says."""
    return mapping_of(text, SPECULATIVE, f"quote it for the shell, or write {SPECULATIVE}.method ngram", '{"method":"ngram"}')


def mapping_of(text: str | None, flag: str, remedy: str = "quote it for the shell", example: str = '{"key":1}') -> dict[str, Any] | None:
    """The JSON object that a flag says."""
    if text is None:
        return None
    try:
        value = from_argument(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object such as {example}")
    return value
