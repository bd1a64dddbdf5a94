"""The Ray Serve application: a gateway before replicas of the server; and what runs it until a signal comes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import ray
import ray.exceptions
from pydantic import ValidationError
from ray import serve
from ray.serve.config import RequestRouterConfig

from echelon.config import EngineConfig
from echelon.errors import ConfigError, UnavailableError
from echelon.inputs import check_kind, first_problem, name_of
from echelon.ray.cluster import listen_on_node_alone
from echelon.ray.gateway import Gateway
from echelon.ray.replica import Replica
from echelon.server.config import ServerConfig
from echelon.speculative_config import SpeculativeConfig, speculative

NAME = "echelon"  # of the application on a cluster
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
REPLICAS_A_GATEWAY = 8
MOST_STARTS = 3  # of a replica whose model cannot be loaded
HEALTH_SECONDS = 5.0  # between checks; Ray Serve replaces a replica that fails three


class ServedReplica(Replica):
    """A replica as Ray Serve knows it, which gives it a name and awaits its end."""

    __del__ = Replica.close

    def __init__(self, *given: Any) -> None:
        listen_on_node_alone()
        super().__init__(*given)

    def metrics(self) -> tuple[str, str]:
        """Its name and its page of /metrics."""
        return serve.get_replica_context().replica_id.unique_id, self.metrics_text()


def build_app(
    model: str | os.PathLike[str],
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
    *,
    num_replicas: int = 1,
    autoscaling_config: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    server: ServerConfig | Mapping[str, Any] | None = None,
    **engine: Any,
) -> serve.Application:
    """A Ray Serve application of replicas that each run an engine and the application of `echelon serve`, for `serve.run`.

    The routes are those of the server, and so are texts. Turns of a conversation meet the replica that has read it so far. A request whose
    replica dies is asked of another one, streams go on where they were cut off, and the text is the same: a request without a seed gets one
    from its X-Request-ID, or from an id that it is given here.

    Parameters
    ----------
    model               folder, which every node has, or hub name
    speculative_config  what drafts, as for `LLM`
    num_replicas        engines; with `autoscaling_config` the fewest
    autoscaling_config  passed to Ray Serve (`max_replicas`, `upscale_delay_s` …); without `target_ongoing_requests` a replica is full with
                        `max_num_seqs`
    ray_actor_options   what a replica takes of a node: `num_cpus` (by default 1; also its threads), `num_gpus`, `runtime_env` …
    server              keys, limits and names, as `ServerConfig`; Ray Serve has the address and reads requests in its place
    engine              settings of `LLM`

    Raises
    ------
    ConfigError  a setting cannot be
    """
    check_kind("num_replicas", num_replicas, int)
    if num_replicas < 1:
        raise ConfigError(f"num_replicas = {num_replicas}; give 1 or more")
    config = server if isinstance(server, ServerConfig) else ServerConfig(**(server or {}))
    rows, drafting = EngineConfig(**engine).max_num_seqs, speculative(speculative_config)
    most, scale = _scale(num_replicas, autoscaling_config, rows)
    replicas = serve.deployment(
        ServedReplica,
        name="Replica",
        **scale,
        ray_actor_options={"num_cpus": 1, **(ray_actor_options or {})},
        max_ongoing_requests=rows + config.max_queue,
        graceful_shutdown_timeout_s=config.drain_timeout,
        health_check_period_s=HEALTH_SECONDS,
        max_constructor_retry_count=MOST_STARTS,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    gateway = serve.deployment(
        serve.ingress()(Gateway),
        name="Gateway",
        num_replicas=-(-most // REPLICAS_A_GATEWAY),
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=most * (rows + config.max_queue),
        graceful_shutdown_timeout_s=config.drain_timeout,
        health_check_period_s=HEALTH_SECONDS,
    )
    given = None if drafting is None else drafting.model_dump(exclude_unset=True)
    return gateway.bind(replicas.bind(name_of(model), given, engine, config), config)


def _scale(num_replicas: int, autoscaling: Mapping[str, Any] | None, rows: int) -> tuple[int, dict[str, Any]]:
    """The most replicas that there may be, and what Ray Serve is told of their number."""
    if autoscaling is None:
        return num_replicas, {"num_replicas": num_replicas}
    given = {"min_replicas": num_replicas, "max_replicas": num_replicas, "target_ongoing_requests": rows, **autoscaling}
    try:
        config = serve.config.AutoscalingConfig(**given)
    except ValidationError as failure:
        raise ConfigError(f"autoscaling_config: {first_problem(failure, given)}; see AutoscalingConfig of Ray Serve") from None
    return config.max_replicas, {"autoscaling_config": config}


def run_until_signal(app: serve.Application, config: ServerConfig, announce: Callable[[], None]) -> None:
    """Run an application on the cluster that this process has joined, and call `announce` once it takes requests, until SIGTERM or SIGINT;
    running requests are answered then, for as long as `config.drain_timeout`.

    Raises
    ------
    UnavailableError  the replicas cannot be started
    """
    ended = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        ended.set()

    quiet = {"log_level": "WARNING", "enable_access_log": False}
    try:
        serve.start(http_options={"host": config.host, "port": config.port}, logging_config=quiet)
        serve.run(app, name=NAME, route_prefix="/", logging_config=quiet)
    except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
        raise UnavailableError(f"the replicas did not start: {_given_up(error)}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    announce()
    ended.wait()
    serve.delete(NAME)


def _given_up(error: Exception) -> str:
    """Why an application does not start, in one line; it is taken from the cluster, whose processes then have no more to say."""
    said = [str(error) or type(error).__name__]
    with suppress(Exception):
        said += [deployment.message for deployment in serve.status().applications[NAME].deployments.values()]
        serve.delete(NAME)
    ray.shutdown()
    lines = [line.strip() for text in said for line in text.splitlines()]
    return next((line for line in reversed(lines) if "Error: " in line), lines[0])
