"""Docstrings of this project as the generator of the site reads them: an extension of `griffe`, named in mkdocs.yml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

RULE = re.compile(r"-{3,}")
ITEM = re.compile(r"(?P<names>\S.*?)(?: {2,}(?P<text>.*))?")  # of a section: a name, and what it means in a column of its own


class SectionsByColumns(griffe.Extension):  # type: ignore[misc]
    """Write sections of two columns (`name   what it means`) as NumPy's (the meaning indented below the name)."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring that is about to be parsed."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(in_rows(obj.docstring.value.splitlines()))


def in_rows(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring, with the items of its sections in NumPy's form."""
    is_section = False
    for i, line in enumerate(lines):
        is_title = i + 1 < len(lines) and RULE.fullmatch(lines[i + 1]) is not None
        is_section = is_title or is_section
        item = ITEM.fullmatch(line)
        if not is_section or is_title or RULE.fullmatch(line) or item is None or line.startswith(" "):
            yield line if not is_section or not line.startswith(" ") else "    " + line.strip()
            continue
        for name in item["names"].split(", "):
            yield name
            yield f"    {item['text'] or ''}".rstrip()
