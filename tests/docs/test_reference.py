"""Pages of reference are what `python -m tools.reference` writes now."""

from __future__ import annotations

import pytest

import echelon.hf
from tools import reference


@pytest.mark.parametrize(("name", "page"), [("settings", reference.settings_page), ("cli", reference.cli_page)])
def test_a_page_is_written_from_the_code(name: str, page: object) -> None:
    assert callable(page)
    written = page()
    assert (reference.DOCS / f"{name}.md").read_text("utf-8") == written, "run: python -m tools.reference"
    assert str(reference.ROOT) not in written, "a page is the same on every machine"


def test_the_page_of_metrics_lists_what_a_server_says() -> None:
    page = reference.metrics_page("vllm:")
    assert (reference.DOCS / "metrics.md").read_text("utf-8") == page, "run: python -m tools.reference"


def test_the_page_of_python_has_every_public_name() -> None:
    page = (reference.DOCS / "api.md").read_text("utf-8")
    assert [name for name in echelon.__all__ if f"echelon.{name}" not in page] == []
    assert f"::: echelon.hf\n    options: {{members: [{', '.join(echelon.hf.__all__)}]}}" in page


def test_every_setting_says_what_it_is() -> None:
    assert [f"{kind.__name__}.{name}" for kind in reference.PARTS for name, f in kind.model_fields.items() if not f.description] == []


def test_every_flag_says_what_it_is() -> None:
    command = reference.typer.main.get_command(reference.app)
    silent = [f"{name} {p.name}" for name, verb in reference.verbs(command) for p in verb.params if not p.help]
    assert silent == []
