"""What the commands of this folder ask their callers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def parser_of(description: str | None, options: Mapping[str, Mapping[str, Any]]) -> argparse.ArgumentParser:
    """A command by its options, and by what `argparse` is told of each; the description is printed as it stands."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, told in options.items():
        parser.add_argument(name, **told)
    return parser
