"""How the server listens, and the bounds of everything that a client may send, hold or wait for."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from echelon.config import Settings
from echelon.errors import ConfigError

SHORTEST_KEY = 16  # characters


class ServerConfig(Settings):
    """Seconds and bytes; a request's own limits (stop strings, `n`, prompts a call) stand in `protocol`.

    api_keys         any of them opens every route; without one the server listens on loopback only
    max_queue        requests that may wait beside those that run, counted in sequences
    queue_timeout    from arrival to the first step
    total_timeout    from arrival to the last token
    header_timeout   of reading a request's head; `body_timeout` of reading its body
    write_timeout    how long a client may leave its end of a connection full
    drain_timeout    how long running requests may go on after SIGTERM
    stall_timeout    without a step while there is work, before the server is no longer healthy
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, lt=65536)
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    metrics_prefix: str = Field(default="echelon:", pattern=r"^([a-zA-Z_]+[:_])?$")
    max_queue: int = Field(default=256, ge=0)
    max_body_bytes: int = Field(default=2**21, ge=1024)
    max_header_bytes: int = Field(default=2**15, ge=1024)
    header_timeout: float = Field(default=10.0, gt=0)
    body_timeout: float = Field(default=30.0, gt=0)
    queue_timeout: float = Field(default=120.0, gt=0)
    total_timeout: float = Field(default=1800.0, gt=0)
    write_timeout: float = Field(default=60.0, gt=0)
    drain_timeout: float = Field(default=300.0, gt=0)
    stall_timeout: float = Field(default=60.0, gt=0)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _is_closed_to_strangers(self) -> Self:
        if any(len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ValueError(f"a key is shorter than {SHORTEST_KEY} characters, or holds others than printable ASCII; draw a longer one")
        if not self.api_keys and not self.is_loopback:
            raise ValueError(
                f"host = {self.host!r} can be reached from elsewhere, and no key is asked for; give --api-key-file, or listen on 127.0.0.1"
            )
        return self


def read_keys(path: Path) -> tuple[str, ...]:
    """Keys from a file, one a line."""
    try:
        keys = tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read keys from {str(path)!r}: {error}; write one key a line") from error
    if not keys:
        raise ConfigError(f"{str(path)!r} holds no key; write one a line")
    return keys
