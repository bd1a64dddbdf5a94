"""`echelon serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from echelon import LLM, EngineConfig
from echelon.cli.shared import Flags, ModelArgument, SpeculativeOption, errors, speculative_mapping, verb
from echelon.errors import MissingExtraError
from echelon.server.config import ServerConfig, id_of, read_keys


@verb(
    server=Flags(
        ServerConfig, "host", "port", "served_model_name", "max_queue", "queue_timeout", "total_timeout", "drain_timeout", "metrics_prefix"
    ),
    engine=Flags(
        EngineConfig,
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "memory",
        "gpu_memory_utilization",
        "dtype",
        "quantization",
        "device",
        "numerics",
        "enable_prefix_caching",
        "enforce_eager",
        max_num_batched_tokens=512,
    ),
)
def serve(
    model: ModelArgument,
    *,
    speculative_config: SpeculativeOption = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys that clients may use, one a line.")] = None,
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve MODEL to OpenAI clients: /v1/completions, /v1/chat/completions, /v1/models, /metrics and more (docs/serving.md)."""
    try:
        from echelon.server.http import serve_until_signal
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed; run: pip install 'echelon[server]'") from error
    config = ServerConfig(**server, api_keys=read_keys(api_key_file) if api_key_file else ())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    engine["max_num_batched_tokens"] = max(engine["max_num_batched_tokens"], engine.get("max_num_seqs", 1))
    llm = LLM(model, speculative_mapping(speculative_config), **engine)
    url = f"http://{config.host}:{config.port}"
    errors.print(f"{config.served_model_name or id_of(llm.target.name)} on {url}/v1, live at {url}/", highlight=False)
    if status := serve_until_signal(llm, config):
        _end_process(status)


def _end_process(status: int) -> NoReturn:
    """End without waiting for the threads of an engine that hangs, or of requests that were cut."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
