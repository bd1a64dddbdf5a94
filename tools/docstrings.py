"""Docstrings of this project as the generator of the site reads them: an extension of `griffe`, named in mkdocs.yml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import griffe

RULE = re.compile(r"-{3,}")
ITEM = re.compile(r"(?P<names>\S.*?)(?: {2,}(?P<meaning>.*))?")


class SectionsByColumns(griffe.Extension):  # type: ignore[misc]
    """Write sections of two columns (`name   what it means`) as NumPy's (the meaning indented below the name)."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change a docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(in_rows(obj.docstring.value.splitlines()))


def in_rows(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring, with the items of its sections in NumPy's form."""
    is_section = False
    for line, after in pairwise([*lines, ""]):
        if RULE.fullmatch(after):
            is_section = True
            yield line
        elif not is_section or RULE.fullmatch(line):
            yield line
        elif line.startswith(" "):
            yield f"    {line.strip()}"
        elif item := ITEM.fullmatch(line):
            for name in item["names"].split(", "):
                yield from (name, f"    {item['meaning'] or ''}".rstrip())
        else:
            yield line
