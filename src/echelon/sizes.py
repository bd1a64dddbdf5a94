"""Bytes as text, and text as bytes."""

from __future__ import annotations

import re

from echelon.errors import ConfigError
from echelon.inputs import shown

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power for power, prefix in enumerate("KMGT", 1) for suffix, base in (("B", 1000), ("iB", 1024))
}  # GB is 10⁹ bytes, GiB 2³⁰
MOST = 2**60
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:[eE]\d+)?)([A-Za-z]*)")


def mebibytes(count: int) -> str:
    """Bytes as text, in MiB."""
    return f"{count / 2**20:,.1f} MiB"


def gibibytes(count: int) -> str:
    """Bytes as text, in MiB below one GiB and in GiB from there on."""
    return mebibytes(count) if abs(count) < 2**30 else f"{count / 2**30:,.2f} GiB"


def parse_bytes(given: object, name: str) -> int:
    """Bytes of a whole number, or of text such as "8GiB", "8GB" or "2e9".

    Raises
    ------
    ConfigError  it is neither, or not between 1 byte and 2⁶⁰
    """
    remedy = f"{name} = {shown(given)} is no amount of memory; give bytes, or text such as '8GiB' (2³⁰ bytes each) or '8GB' (10⁹)"
    match = _SIZE.fullmatch(given) if isinstance(given, str) else None
    if match is not None and match[2] in UNITS:
        number = float(match[1]) * UNITS[match[2]]
    elif isinstance(given, int) and not isinstance(given, bool):
        number = given
    else:
        raise ConfigError(remedy)
    if not 1 <= number <= MOST:
        raise ConfigError(f"{name} = {shown(given)} is not between 1 byte and 2⁶⁰; give bytes, or text such as '8GiB'")
    return int(number)
