"""Configuration of the server: where it listens, and the bounds of everything that a client may send, hold or wait for."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, Field, SecretStr, model_validator

from echelon.aio.limits import Limits
from echelon.errors import ConfigError

SHORTEST_KEY = 16  # characters


class ServerConfig(Limits):
    """Seconds and bytes, beside the engine's `Limits`; a request's own (stop strings, `n`, prompts a call) stand in `protocol`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on; other than loopback only with keys.")
    port: int = Field(default=8000, ge=0, lt=65536, description="Port to listen on; 0 takes a free one.")
    api_keys: tuple[SecretStr, ...] = Field(
        default=(), repr=False, description="Any of them opens every route; without one the server listens on loopback only."
    )
    served_model_name: str | None = Field(
        default=None, description="What clients call the model; by default the name of its folder, or at the hub."
    )
    metrics_prefix: str = Field(
        default="echelon:", pattern=r"^([a-zA-Z_]+[:_])?$", description="Prefix of names at /metrics; `vllm:` for clients made for vLLM."
    )
    max_body_bytes: int = Field(default=2**21, ge=1024, description="Bytes of a request's body.")
    max_body_pieces: int = Field(
        default=2**14, ge=1024, description="Chunks and reads in which a body may arrive: each costs about 10 µs, however small it is."
    )
    max_header_bytes: int = Field(default=2**15, ge=1024, description="Bytes of a request's head.")
    max_buffer_bytes: int = Field(
        default=2**26, ge=0, description="Bytes that may wait in all connections together before the client that reads least is cut."
    )
    header_timeout: float = Field(default=10.0, gt=0, description="Seconds of reading a request's head.")
    body_timeout: float = Field(default=30.0, gt=0, description="Seconds of reading its body.")
    write_timeout: float = Field(default=60.0, gt=0, description="Seconds that a client may leave its end of a connection full.")
    drain_timeout: float = Field(default=300.0, gt=0, description="Seconds that running requests have after SIGTERM.")

    @property
    def is_loopback(self) -> bool:
        """Whether `host` can be reached from this machine alone."""
        return names_loopback(self.host)

    @model_validator(mode="after")
    def _is_closed_to_strangers(self) -> Self:
        for i, key in enumerate(self.api_keys, 1):
            if not _is_good_key(key.get_secret_value()):
                raise ValueError(
                    f"API key {i} of {len(self.api_keys)} is shorter than {SHORTEST_KEY} characters, or holds a space or others than "
                    "printable ASCII; draw a longer one"
                )
        if not self.api_keys and not self.is_loopback:
            raise ValueError(
                f"host = {self.host!r} can be reached from elsewhere, and no key is asked for; give --api-key-file, or listen on 127.0.0.1"
            )
        return self


def names_loopback(host: str) -> bool:
    """Whether a host, of IPv6 with or without brackets, is `localhost` or an address that no other machine reaches."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def url_of(host: str, port: int) -> str:
    """Where a server listens."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def id_of(name: str) -> str:
    """What clients call a model by default: a folder's own name, which tells nothing of where it lies; a hub name as it is."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def _is_good_key(key: str) -> bool:
    return len(key) >= SHORTEST_KEY and key.isascii() and key.isprintable() and " " not in key


def read_keys(path: Path) -> tuple[SecretStr, ...]:
    """Keys from a file, one a line. Errors name neither its contents nor its path, where a key may have been given by mistake.

    Raises
    ------
    ConfigError  the file cannot be read, is no UTF-8 text, or holds no key
    """
    try:
        keys = tuple(SecretStr(line.strip()) for line in path.read_bytes().decode().splitlines() if line.strip())
    except UnicodeDecodeError:
        raise ConfigError("the file of --api-key-file is no UTF-8 text; write one key a line") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no path"
        raise ConfigError(f"cannot read the file of --api-key-file: {reason}; give a file with one key a line") from None
    if not keys:
        raise ConfigError("the file of --api-key-file holds no key; write one a line")
    return keys
