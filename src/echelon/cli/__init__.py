"""The `echelon` command. Progress and messages go to stderr, results to stdout or to the file asked for.

Exit codes: 0 done, 1 a check failed (of `serve`: its engine), 2 usage, 3 some rows failed or requests were cut, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Annotated, Any

import transformers
import typer
from rich.markup import escape

from echelon import EchelonError
from echelon.cli import bench
from echelon.cli.chat import chat
from echelon.cli.convert import convert
from echelon.cli.doctor import doctor
from echelon.cli.drafters import drafters
from echelon.cli.generate import generate
from echelon.cli.inflate import inflate
from echelon.cli.inspect import inspect
from echelon.cli.plan import plan
from echelon.cli.quantize import quantize
from echelon.cli.serve import serve
from echelon.cli.shared import SPECULATIVE, errors, from_argument
from echelon.cli.train import train
from echelon.cli.verify import verify
from echelon.ops import compiled

app = typer.Typer(
    help="Batched speculative decoding: several tokens a step from every sequence, no padding, the same text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (generate, chat, verify, drafters, inspect, plan, doctor, inflate, quantize, serve, train, convert):
    app.command()(command)
app.add_typer(bench.app, name="bench")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"echelon {version('echelon')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """What stands before every verb."""


def join_dotted(arguments: list[str]) -> list[str]:
    """`--speculative-config.key value` (or `=value`) pairs become one `--speculative-config JSON`."""
    config: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.startswith(SPECULATIVE + "."):
            rest.append(word)
            continue
        key, equals, value = word.removeprefix(SPECULATIVE + ".").partition("=")
        value = value if equals else next(words, "")
        try:
            config[key] = from_argument(value)
        except ValueError:
            config[key] = value
    return [*rest, SPECULATIVE, json.dumps(config)] if config else rest


def main() -> None:
    """Entry point: errors of ours become one line and exit code 2."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        if compiled.is_built():
            compiled.isa()  # refuses an ECHELON_ISA that is not there, whatever the command
        app(join_dotted(sys.argv[1:]), prog_name="echelon", standalone_mode=True)
    except EchelonError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
