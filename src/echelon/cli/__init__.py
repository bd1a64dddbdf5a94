"""The `echelon` command. Progress and messages go to stderr, results to stdout or to the file asked for.

Exit codes: 0 done, 1 a check failed (of `serve`: its engine), 2 usage, 3 some rows failed or requests were cut, 130 interrupted.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from echelon.cli.words import SPECULATIVE, errors, from_argument
from echelon.errors import ConfigError, EchelonError
from echelon.release import version

VERBS = ("generate", "chat", "verify", "drafters", "inspect", "plan", "doctor", "inflate", "quantize", "serve", "train", "convert", "bench")


class LoadedVerbs(Mapping[str, Any]):
    """Commands by verb, each read from the module of its name when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in VERBS:
            raise KeyError(name)
        _prepare()
        module = import_module(f"echelon.cli.{name}")
        if (app := getattr(module, "app", None)) is None:
            app = typer.Typer(rich_markup_mode="markdown", add_completion=False)
            app.command(name)(getattr(module, name))
        command = typer.main.get_command(app)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class Verbs(TyperGroup):
    """The root of all verbs, which lists them without loading them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LoadedVerbs()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, for which it is enough to read what the verbs say of themselves."""
        self.commands = {name: TyperCommand(name, help=_summary(name)) for name in VERBS}
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=Verbs,
    help="Batched speculative decoding: several tokens a step from every sequence, no padding, the same text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _summary(verb: str) -> str:
    """The first paragraph of a verb's docstring, without loading what it needs."""
    module = ast.parse((Path(__file__).parent / f"{verb}.py").read_text("utf-8"))
    function = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == verb), module)
    return (ast.get_docstring(function) or "").split("\n\n")[0]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"echelon {version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """What stands before every verb."""


def _prepare() -> None:
    """Quieten transformers, and refuse an ECHELON_ISA that is not there, whatever the verb."""
    import transformers

    from echelon.ops import compiled

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if compiled.is_built():
        compiled.isa()


def join_dotted(arguments: list[str]) -> list[str]:
    """`--speculative-config.key value` (or `=value`) pairs become one `--speculative-config JSON`; what follows `--` stays as it is.

    Raises
    ------
    ConfigError  there is a JSON besides, or a key twice
    """
    config: dict[str, Any] = {}
    rest: list[str] = []
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = iter(arguments[:end])
    for word in words:
        if not word.startswith(SPECULATIVE + "."):
            rest.append(word)
            continue
        key, equals, value = word.removeprefix(SPECULATIVE + ".").partition("=")
        value = value if equals else next(words, "")
        if key in config:
            raise ConfigError(f"{SPECULATIVE}.{key} is given twice; several settings are several times {SPECULATIVE} JSON")
        try:
            config[key] = from_argument(value)
        except ValueError:
            config[key] = value
    if config and any(word == SPECULATIVE or word.startswith(SPECULATIVE + "=") for word in rest):
        raise ConfigError(f"{SPECULATIVE} JSON and {SPECULATIVE}.{next(iter(config))} are both given; write all in one of the two ways")
    return [*rest, *([SPECULATIVE, json.dumps(config)] if config else []), *arguments[end:]]


def main() -> None:
    """Entry point: errors of ours become one line and exit code 2."""
    try:
        app(join_dotted(sys.argv[1:]), prog_name="echelon", standalone_mode=True)
    except EchelonError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
