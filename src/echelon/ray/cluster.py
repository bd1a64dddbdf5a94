"""The Ray cluster that a process works on: one of its own, on loopback, or one by its address, which has to ask for a token."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from typing import Any

import grpc
import ray
from ray._private import ray_constants
from ray.serve._private import replica as serving

from echelon.errors import ConfigError

PROBE_SECONDS = 10.0
NO_TOKEN = "whoever reaches a cluster without a token runs any code there"


def connect(address: str | None = None, num_cpus: int | None = None) -> None:
    """Join the cluster at `address` (HOST:PORT of its head), or start one on this machine that ends with this process.

    One that is started listens on loopback alone, asks for a token, and runs actors at the priority of other processes (Ray's own would be
    15 niced, which starves an engine beside anything else). `num_cpus`: what it may promise to actors; by default the cores.

    Raises
    ------
    ConfigError  the address is none; the cluster reaches beyond loopback and asks nobody for a token, or this process has none; or one that
                 was started does not stay on loopback
    """
    if address is None:
        _start(num_cpus)
        return
    host = _host_of(address)
    _check_reached(address, host)
    if not _is_loopback(host):
        _check_closed(address)
    try:
        ray.init(address=address, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(f"cannot join the Ray cluster at {address!r}: {str(error).splitlines()[0]}; check address and token") from None
    if _is_loopback(host) and not all(_is_loopback(node["NodeManagerAddress"]) for node in ray.nodes()):
        try:
            _check_closed(address)
        except ConfigError:
            ray.shutdown()
            raise


def listen_on_node_alone() -> None:
    """Bind the port on which an actor of Ray Serve in this process is going to take calls of other actors to the node's own address, so to
    loopback on a cluster of this machine: Ray binds it to all interfaces, and unpickles what comes in.
    """
    host = ray.util.get_node_ip_address()
    add = serving.add_port_to_grpc_server

    def add_narrowed(server: Any, address: str) -> Any:
        return add(server, address.replace("[::]", f"[{host}]" if ":" in host else host))

    serving.add_port_to_grpc_server = add_narrowed


def _start(num_cpus: int | None) -> None:
    """Ray reads some of this when it is imported, and then asks for a token by itself; what came of it is checked."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise ConfigError(f"RAY_AUTH_MODE is {mode!r}: {NO_TOKEN}; unset it")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # no cluster of several machines: all ports on loopback
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")  # Ray's 5 are short for a process to start on a busy machine
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of this cluster; Ray would keep one in a file for all
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, logging_level="ERROR")
    if not _is_loopback(ray.util.get_node_ip_address()) or os.environ.get("RAY_AUTH_MODE") != "token":
        ray.shutdown()
        raise ConfigError("Ray was configured otherwise before, and listens beyond loopback or without a token; connect first of all")


def _host_of(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()) or "/" in address:
        raise ConfigError(f"the Ray address {address!r} is none; give HOST:PORT of the head, such as 10.0.0.5:6379")
    return host.strip("[]")


def _check_reached(address: str, host: str) -> None:
    """Raise where nobody listens, which Ray would wait for."""
    try:
        socket.create_connection((host, int(address.rpartition(":")[2])), PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "no such port or host"
        raise ConfigError(f"no Ray cluster answers at {address!r} ({reason}); check address and firewall") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_closed(address: str) -> None:
    """Raise where this process has no token, or the head answers somebody who has none."""
    what = f"the Ray cluster at {address!r} reaches beyond loopback, and"
    remedy = f"{NO_TOKEN}; set RAY_AUTH_MODE=token and a token (`ray get-auth-token --generate`) for its nodes and here"
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise ConfigError(f"{what} no token is set here: {remedy}")
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # nobody is answered who has no certificate
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId", lambda b: b, lambda b: b)
        try:
            ask(b"", timeout=PROBE_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return
            raise ConfigError(f"no Ray cluster answers at {address!r} ({error.code().name}); check address and firewall") from None
    raise ConfigError(f"{what} asks for no token: {remedy}")
