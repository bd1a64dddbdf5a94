"""Write the pages of reference from the code: `python -m tools.reference` (docs/settings.md, docs/cli.md, docs/metrics.md)."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic.fields import FieldInfo

from echelon import LLM, EngineConfig, SamplingParams, SpeculativeConfig, load_model
from echelon.cli import app
from echelon.cli.words import SPECULATIVE
from echelon.demo import TARGET
from echelon.inputs import LARGEST
from echelon.model.load.loading import LoadedModel
from echelon.server.config import ServerConfig
from echelon.server.metrics import ServerMetrics
from echelon.settings import Settings
from tools import ROOT

DOCS = ROOT / "docs"
SETTINGS = """# Settings

Names are vLLM's where vLLM has one. All settings are checked when they are made: unknown names, other types and values out of range are
refused with an error that says what is allowed. `python -m tools.reference` writes this page from the code.

{parts}
"""
PARTS: dict[type[Settings], str] = {
    EngineConfig: "keywords of `LLM(model, ...)` and `AsyncLLM(model, ...)`, flags of the command line",
    SpeculativeConfig: f"what `speculative_config` and `{SPECULATIVE}` take",
    SamplingParams: "of a request; in requests to the server under the same names",
    ServerConfig: "flags of `echelon serve`; those without a flag are bounds that `ServerConfig` takes in a program",
}
CLI = """# Command line

Progress and messages go to stderr, results to stdout or to the file asked for. Exit codes: 0 done, 1 a check failed (of `serve`: its
engine), 2 usage, 3 some rows failed or requests were cut, 130 interrupted. `{speculative} JSON` may be written in parts:
`{speculative}.method ngram`. `python -m tools.reference` writes this page from the code.

{parts}
"""
METRICS = """# Metrics

What `GET /metrics` of `echelon serve` says, for Prometheus. `--metrics-prefix vllm:` puts vLLM's prefix before the names, for dashboards
and clients made for vLLM. Counters begin with the process. In Python `LLM.get_metrics()` returns those
of the engine as objects with vLLM's names, and `LLM.get_counters()` its own counters as a mapping.
`python -m tools.reference` writes this page from a server's answer.

| name | kind | labels | meaning |
|---|---|---|---|
{rows}

Every name also has the label `model_name`. `reason` is `raised`, `garbage`, `too slow` or `cut off`; `limit` is `time`, `buffers` or
`stream`; `acceptance` says LOSSY where the rule changes the text. The tokens that were proposed, predictions and regret are there where
draft lengths are "auto". An acceptance rate is `spec_decode_num_accepted_tokens_total` over `spec_decode_num_draft_tokens_total`.
"""


def settings_page() -> str:
    """docs/settings.md."""
    return SETTINGS.format(parts="\n\n".join(_settings_part(kind, where) for kind, where in PARTS.items()))


def _settings_part(kind: type[Settings], where: str) -> str:
    rows = [_row(f"`{name}`", values_of(f), f"`{_default(f)}`", f.description or "") for name, f in kind.model_fields.items()]
    head = _row("name", "values", "default", "meaning"), "|---|---|---|---|"
    return "\n".join([f"## {kind.__name__}", "", f"{where[0].upper()}{where[1:]}.", "", inspect.getdoc(kind) or "", "", *head, *rows])


def values_of(field: FieldInfo) -> str:
    """What a setting may be, in words."""
    return _words(field.annotation, field.metadata)


def _words(kind: Any, notes: Iterable[Any] = ()) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(arguments[0], (*arguments[1:], *notes))
    if isinstance(kind, FieldInfo):
        return values_of(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(part, notes) for part in arguments)
    if origin is Literal:
        return ", ".join(f"`{value!r}`" for value in arguments)
    if origin is tuple:
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return f"mapping from {_words(arguments[0])} to {_words(arguments[1])}"
    plain = {int: "integer", float: "number", str: "text", bool: "`True`, `False`", type(None): "`None`"}
    return plain.get(kind, "function" if not isinstance(kind, type) else "text") + _bounds(kind, notes)


def _bounds(kind: Any, notes: Iterable[Any]) -> str:
    """The range of a number, without what is only there so that it fits into 64 bits."""
    if kind not in (int, float):
        return ""
    inner = [note for n in notes for note in (n.metadata if isinstance(n, FieldInfo) else [n])]
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
    found = [
        f"{sign} {value}" for note in inner for name, sign in signs if (value := getattr(note, name, None)) is not None and value < LARGEST
    ]
    return " " + " and ".join(found) if found else ""


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else repr(field.default)


def cli_page() -> str:
    """docs/cli.md."""
    command = typer.main.get_command(app)
    parts = "\n\n".join(_verb(name, verb) for name, verb in verbs(command))
    return CLI.format(speculative=SPECULATIVE, parts=parts)


def verbs(command: Any, before: str = "echelon") -> Iterator[tuple[str, Any]]:
    """Every verb of the command line with its whole name."""
    for name, verb in command.commands.items():
        if hasattr(verb, "commands"):
            yield from verbs(verb, f"{before} {name}")
        else:
            yield f"{before} {name}", verb


def _verb(name: str, verb: Any) -> str:
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    options = [p for p in verb.params if p.param_type_name == "option"]
    usage = " ".join([name, *(_usage(a) for a in arguments)])
    head = _row("option", "default", "meaning"), "|---|---|---|"
    rows = [_row(f"`{'`, `'.join([*o.opts, *o.secondary_opts])}`", _shown_default(o), _meaning(o)) for o in options]
    described = [f"- `{_usage(a)}`: {a.help}" for a in arguments if a.help]
    return "\n".join([f"## {name}", "", f"`{usage} [OPTIONS]`", "", inspect.cleandoc(verb.help), "", *described, "", *head, *rows])


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _meaning(option: Any) -> str:
    """Its help, and what it may be where that is one of a few words."""
    words = ", ".join(f"`{choice}`" for choice in option.type_descriptor.choices or ())
    return " ".join(part for part in (option.help or "", f"One of {words}." if words else "") if part)


def _shown_default(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.default in (None, "") or option.default is False else f"`{option.default}`"


def metrics_page(prefix: str) -> str:
    """docs/metrics.md, from the answers of servers whose names begin with `prefix`."""
    target = load_model(TARGET)
    answers = (_answer(target, prefix, length) for length in ("auto", 4))  # what adapts, and what has surely drafted
    families = {f.name: f for text in answers for f in text_string_to_metric_families(text) if not f.name.endswith("_created")}
    rows = (_row(f"`{_sample_name(f).removeprefix(prefix)}`", f.type, _labels(f), f.documentation) for _, f in sorted(families.items()))
    return METRICS.format(rows="\n".join(rows))


def _answer(target: LoadedModel, prefix: str, length: int | str) -> str:
    """What a server says after a request with n-grams of this draft length."""
    with LLM(target, {"method": "ngram", "num_speculative_tokens": length}, max_num_seqs=1) as llm:
        llm.generate(["for i in range(10):\n    print(i)\n" * 4], SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
        return ServerMetrics(llm, prefix, "MODEL").text().decode()


def _sample_name(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def _labels(family: Metric) -> str:
    names = {name: {s.labels[name] for s in family.samples if name in s.labels} for s in family.samples for name in s.labels}
    return "; ".join(f"`{name}`" for name in names if name not in ("model_name", "le"))


def _row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    pages = {"settings": settings_page(), "cli": cli_page(), "metrics": metrics_page(ServerConfig().metrics_prefix)}
    for name, page in pages.items():
        (DOCS / f"{name}.md").write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
