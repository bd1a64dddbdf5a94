"""Code in the documents runs: Python against the embedded models, commands through the command line's own parser. What does not run is
marked, with the reason, by a comment before it: `<!-- not run: why -->`.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from echelon import SpeculativeConfig
from echelon.cli import app, join_dotted
from echelon.cli.shared import speculative_mapping
from echelon.demo import DRAFT, EAGLE, TARGET
from echelon.speculative_config import speculative

ROOT = Path(__file__).parents[2]
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
FENCE = re.compile(r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(?!`)([^`]+)`(?!`)")
PLACES = {"path/or/hub-name": "LOADED", "path/of/draft": repr(str(DRAFT)), "path/of/head": repr(str(EAGLE))}
NOT_CODE = "text"


@dataclass(frozen=True)
class Block:
    """A fenced block: its document, its language, its code, and why it is not run."""

    document: str
    language: str
    code: str
    why: str | None


def blocks() -> Iterator[Block]:
    for name, path in DOCUMENTS.items():
        for found in FENCE.finditer(path.read_text("utf-8")):
            yield Block(name, found["language"], found["code"], found["why"])


BLOCKS = list(blocks())
RUN = [block for block in BLOCKS if block.why is None]
LINES = ((block.document, line) for block in RUN if block.language == "sh" for line in block.code.replace("\\\n", " ").splitlines())
COMMANDS = [(document, line) for document, line in LINES if line.strip() and not line.startswith("#")]


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command line makes of `echelon` and these words."""
    command: Any = typer.main.get_command(app)
    rest = join_dotted(words)
    while hasattr(command, "commands"):
        name, *rest = rest
        assert name in command.commands, f"there is no verb {name}"
        command = command.commands[name]
    return dict(command.make_context(command.name, rest).params)


def check_command(line: str) -> None:
    """Fail for a command that could not run: an unknown verb, flag, target of make, extra or module."""
    program, *rest = shlex.split(re.sub(r"^[A-Z]+=\$\((.*)\)$", r"\1", line), comments=True)
    if program == "echelon":
        drafters = parsed(rest).get("speculative_config") or ()
        for text in [drafters] if isinstance(drafters, str) else drafters:
            speculative(speculative_mapping(text))
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE), rest[0]
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        named = {extra for word in rest for found in re.findall(r"^(?:echelon|\.)\[(.*)\]$", word) for extra in found.split(",")}
        assert named <= extras.keys()
    elif program == "python" and rest[0] == "-m":
        assert find_spec(rest[1]) is not None, rest[1]
    elif program == "python" and rest[0] == "-c":
        compile(rest[1], line, "exec")
    else:
        raise AssertionError(f"{program} is no command that is checked here; mark the block: <!-- not run: why -->")


def given() -> dict[str, Any]:
    """Names that code inside `transformers` finds there."""
    tokenizer = AutoTokenizer.from_pretrained(str(TARGET), padding_side="left")
    model, draft = (AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32) for path in (TARGET, DRAFT))
    return {"model": model, "draft": draft, "batch": tokenizer(["def main(argv):\n", "import"], return_tensors="pt", padding=True)}


def test_every_block_says_what_it_is() -> None:
    assert {(b.document, b.language) for b in BLOCKS if b.language not in ("python", "sh", NOT_CODE)} == set()
    for name, path in DOCUMENTS.items():
        text = path.read_text("utf-8")
        assert text.count("```") == 2 * len(FENCE.findall(text)), f"{name}: a fence that is not seen here"
        marked = sum(b.why is not None for b in BLOCKS if b.document == name)
        assert len(re.findall("^<!-- not run:", text, re.MULTILINE)) == marked, f"{name}: a mark without its block"
    assert {b.language for b in RUN} >= {"python", "sh"}


@pytest.mark.parametrize("document", sorted({b.document for b in RUN if b.language == "python"}))
def test_python_runs(document: str) -> None:
    """The blocks of a document one after the other, in one namespace; the model that they name is loaded once for all."""
    code = [b.code for b in RUN if b.document == document and b.language == "python"]
    names = {"LOADED": servers.pair()[0]} | (given() if "**batch" in "".join(code) else {})
    for block in code:
        exec(compile(re.sub('"(path/[^"]+)"', lambda found: PLACES[found[1]], block), document, "exec"), names)


@pytest.mark.parametrize(("document", "line"), COMMANDS)
def test_commands_are_understood(document: str, line: str) -> None:
    check_command(line)


def options_of(words: list[str]) -> tuple[list[str], set[str]]:
    """The verb that words begin with, and all its flags."""
    command: Any = typer.main.get_command(app)
    verb: list[str] = []
    for word in words:
        if hasattr(command, "commands") and word in command.commands:
            command, verb = command.commands[word], [*verb, word]
    return verb, {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_a_line_have_verbs_and_flags_that_exist(document: str) -> None:
    text = FENCE.sub("", DOCUMENTS[document].read_text("utf-8"))
    for span in INLINE.findall(text):
        words = span.split()
        if words[:1] == ["echelon"] and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            verb, flags = options_of(words[1:])
            assert verb, span
            used = {re.split(r"[.=]", word)[0] for word in words if word.startswith("--")}
            assert used <= flags, span


def test_drafters_that_are_named_are_configurations() -> None:
    found = re.findall(r"`(\{\"method\".*?\})`", (ROOT / "docs/drafters.md").read_text("utf-8"))
    assert len(found) >= 4
    for text in found:
        SpeculativeConfig(**json.loads(text))
