"""What `torchrun`, or whoever sets its variables, says to a process: which rank it is, of how many, and where they meet."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

from echelon.errors import ConfigError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TOKEN = "ECHELON_RANK_TOKEN"
FEWEST_CHARACTERS = 16  # of a token
UNSET = "unset RANK and WORLD_SIZE where this process is to start its ranks itself"


@dataclass(frozen=True)
class Summons:
    """This process is rank `rank` of `size`. They meet in a store at `host` and `port`, which `torchrun` keeps or else rank 0.

    own    this machine's address on the way there
    round  how often `torchrun` has started all of them anew
    """

    rank: int
    size: int
    host: str
    port: int
    own: str
    token: str
    has_store: bool
    round: str

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine can reach what listens at `own`."""
        return ipaddress.ip_address(self.own).is_loopback


def summoned() -> Summons | None:
    """None where nobody has started this process as one of several.

    Raises
    ------
    ConfigError  the variables are incomplete or none that can be; ranks meet beyond loopback without a token
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    if missing := [name for name in NEEDED if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE is set, and {', '.join(missing)} not: torchrun sets all of {', '.join(NEEDED)}; or {UNSET}")
    rank, size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size:
        raise ConfigError(f"RANK is {rank} where WORLD_SIZE is {size}; ranks are 0 to {size - 1}")
    host = os.environ["MASTER_ADDR"]
    found = Summons(
        rank,
        size,
        host,
        port,
        _own_address(host, port),
        os.environ.get(TOKEN, ""),
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    if len(found.token) < FEWEST_CHARACTERS and not (found.is_loopback and not found.token):
        where = f"has {len(found.token)} characters" if found.token else f"is not set, and ranks meet beyond loopback, at {host}"
        raise ConfigError(f"{TOKEN} {where}; set one of at least {FEWEST_CHARACTERS}, the same for all ranks (docs/parallel.md)")
    return found


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal() or len(text) > len("65535"):
        raise ConfigError(f"{name} is {text!r}, which is no number of 0 to 99999; torchrun sets it; or {UNSET}")
    return int(text)


def _own_address(host: str, port: int) -> str:
    """The address from which packets go to `host`; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR {host!r} cannot be reached ({error.strerror}); give the name or address of rank 0's machine"
        ) from error
