"""Devices by name: what the vendors say of them, and what a user adds in a file of the same form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from echelon.errors import ConfigError
from echelon.inputs import first_line, shown
from echelon.settings import Settings

TABLE = Path(__file__).with_name("devices.json")
EXAMPLE = '{"my-card": {"memory_gb": 24, "read_gb": 900, "tflops": {"bfloat16": 120}, "link_gb": 25, "link_us": 20, "source": "measured"}}'


class Work(NamedTuple):
    """What a piece of a step asks of a device: operations (a multiplication and an addition are two), and bytes moved in its memory."""

    flops: float
    bytes: float


class Device(Settings):
    """One device, as published or measured."""

    memory_gb: float = Field(gt=0.0, description="10⁹ bytes of memory.")
    read_gb: float = Field(gt=0.0, description="10⁹ bytes of it that are read in a second.")
    tflops: dict[str, Annotated[float, Field(gt=0.0)]] = Field(
        min_length=1, description="10¹² operations a second by dtype, dense; int8: in integers."
    )
    link_gb: float = Field(gt=0.0, description="10⁹ bytes a second that it sends to other devices, and receives at the same time.")
    link_us: float = Field(default=0.0, ge=0.0, description="Microseconds until something small has arrived.")
    layer_us: float = Field(default=0.0, ge=0.0, description="Microseconds that a layer takes besides its work: launches, small kernels.")
    source: str = Field(min_length=1, description="Where the figures are from.")

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory."""
        return int(self.memory_gb * 1e9)

    def flops(self, dtype: str) -> float:
        """Operations a second.

        Raises
        ------
        ConfigError  nobody has said how fast it is with this dtype
        """
        if dtype not in self.tflops:
            raise ConfigError(
                f"the device has no speed in {dtype}; choose another --dtype ({', '.join(self.tflops)}), or add it to a table"
            )
        return self.tflops[dtype] * 1e12

    def multiplied_in(self, dtype: str, is_rounded: bool) -> str:
        """What linear layers are multiplied in: of 8-bit or 4-bit weights integers, where the device has published speed in them."""
        return "int8" if is_rounded and "int8" in self.tflops else dtype

    def seconds(self, work: Work, dtype: str) -> float:
        """The roofline: what takes longer of operations and bytes."""
        return max(work.flops / self.flops(dtype), work.bytes / (self.read_gb * 1e9))

    def seconds_to_send(self, count: float) -> float:
        """Until so many bytes have arrived at another device."""
        return self.link_us * 1e-6 + count / (self.link_gb * 1e9)


def read_devices(path: Path | None = None) -> dict[str, Device]:
    """The published devices, and those in the JSON file `path`, an object by name; what is there replaces the published of that name.

    Raises
    ------
    ConfigError  the file cannot be read, or says something else
    """
    found = _parsed(TABLE)
    return found if path is None else found | _parsed(path)


def _parsed(path: Path) -> dict[str, Device]:
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"devices cannot be read from {shown(str(path))} ({first_line(error)}); write {EXAMPLE}") from None
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ConfigError(f"{shown(str(path))} holds no devices by name; write {EXAMPLE}")
    found = {}
    for name, entry in table.items():
        try:
            found[name] = Device(**entry)
        except ConfigError as error:
            raise ConfigError(f"device {shown(name)} of {shown(str(path))}: {error}") from None
    return found


def device_named(name: str, devices: Mapping[str, Device]) -> Device:
    """The device of this name.

    Raises
    ------
    ConfigError  there is none, with the names that there are
    """
    if name not in devices:
        raise ConfigError(f"there is no device {shown(name)}; known: {', '.join(devices)}; add one with --devices FILE: {EXAMPLE}")
    return devices[name]
