"""`echelon serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.markup import escape

from echelon import LLM, EngineConfig
from echelon.cli.shared import (
    BATCHED,
    ENGINE,
    Flags,
    ModelArgument,
    SpeculativeOption,
    mapping_of,
    speculative_mapping,
    verb,
)
from echelon.cli.words import errors
from echelon.errors import ConfigError, MissingExtraError
from echelon.server.config import ServerConfig, id_of, read_keys, url_of


@verb(
    server=Flags(
        ServerConfig, "host", "port", "served_model_name", "max_queue", "queue_timeout", "total_timeout", "drain_timeout", "metrics_prefix"
    ),
    engine=Flags(EngineConfig, *ENGINE, *BATCHED, max_num_batched_tokens=512),
)
def serve(
    model: ModelArgument,
    *,
    speculative_config: SpeculativeOption = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys that clients may use, one a line.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines on Ray Serve that share the requests (docs/replicas.md).", min=1)] = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Head of a Ray cluster for the replicas; without, one starts on loopback.")
    ] = None,
    autoscaling_config: Annotated[
        str | None, typer.Option(metavar="JSON", help='For Ray Serve, e.g. `{"max_replicas":4}`; `--replicas` are the fewest then.')
    ] = None,
    ray_actor_options: Annotated[
        str | None, typer.Option(metavar="JSON", help='What a replica takes of a node, e.g. `{"num_cpus":8,"num_gpus":1}`.')
    ] = None,
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve MODEL to OpenAI clients: /v1/completions, /v1/chat/completions, /v1/models, /metrics and more (docs/serving.md)."""
    try:
        from echelon.server.http import check_address, serve_until_signal
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed; run: pip install 'echelon[server]'") from error
    config = ServerConfig(**server, api_keys=read_keys(api_key_file) if api_key_file else ())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    on_ray = {"--ray-address": ray_address, "--autoscaling-config": autoscaling_config, "--ray-actor-options": ray_actor_options}
    if replicas is not None:
        scale, taken = (mapping_of(on_ray[flag], flag) for flag in ("--autoscaling-config", "--ray-actor-options"))
        _serve_replicas(model, config, replicas, ray_address, scale, taken, speculative_mapping(speculative_config), engine)
        return
    if given := [flag for flag, value in on_ray.items() if value is not None]:
        raise ConfigError(f"{', '.join(given)}: how replicas run on Ray; give --replicas too")
    check_address(config)
    llm = LLM(model, speculative_mapping(speculative_config), **engine)
    name = config.served_model_name or id_of(llm.target.name)
    if status := serve_until_signal(llm, config, lambda url: errors.print(escape(f"{name} on {url}/v1, live at {url}/"), highlight=False)):
        _end_process(status)


def _serve_replicas(
    model: str,
    config: ServerConfig,
    count: int,
    address: str | None,
    scale: dict[str, Any] | None,
    taken: dict[str, Any] | None,
    drafting: dict[str, Any] | None,
    engine: dict[str, Any],
) -> None:
    """Serve by replicas on the Ray cluster at `address`, or on one of this machine, whose cores and devices they share out by default."""
    from echelon.ray import build_app, connect, run_until_signal

    if config.port == 0:
        raise ConfigError("--port 0 is a free port, which Ray Serve cannot tell; give a number with --replicas")
    cores = len(os.sched_getaffinity(0))
    if address is None:
        has_device = engine.get("device", "auto") != "cpu" and torch.cuda.is_available()
        taken = {"num_cpus": max(1, cores // count), "num_gpus": int(has_device)} | (taken or {})
    app = build_app(model, drafting, num_replicas=count, autoscaling_config=scale, ray_actor_options=taken, server=config, **engine)
    connect(address, num_cpus=max(cores, count, int((scale or {}).get("max_replicas", 1))))
    name = config.served_model_name or id_of(model)
    url = url_of(config.host, config.port)
    run_until_signal(app, config, lambda: errors.print(escape(f"{name} on {url}/v1, live at {url}/, {count} replicas"), highlight=False))


def _end_process(status: int) -> NoReturn:
    """End without waiting for the threads of an engine that hangs, or of requests that were cut."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
