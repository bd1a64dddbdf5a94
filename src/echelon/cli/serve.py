"""`echelon serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from echelon import LLM
from echelon.cli.generate import DType, bytes_or_auto, speculative_mapping
from echelon.cli.shared import SPECULATIVE, Device, DeviceOption, EagerOption, ModelArgument, Numerics, NumericsOption, errors
from echelon.errors import MissingExtraError


def serve(
    model: ModelArgument,
    speculative_config: Annotated[
        str | None, typer.Option(SPECULATIVE, metavar="JSON", help="What drafts, as for `generate`; also dotted.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback only with keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys that clients may use, one a line.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model; MODEL by default.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Rows that run at once.", min=1)] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens of a step before drafts: longer prompts go in pieces.", min=1)
    ] = 512,
    max_model_len: Annotated[int | None, typer.Option(help="Context limit in tokens; the model's own by default.")] = None,
    kv_cache_memory_bytes: Annotated[str, typer.Option(help="Bytes of the KV pool, or auto.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: as stored.")] = DType.auto,
    device: DeviceOption = Device.auto,
    numerics: NumericsOption = Numerics.invariant,
    enforce_eager: EagerOption = False,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait; more are refused with 429.", min=0)] = 256,
    queue_timeout: Annotated[float, typer.Option(help="Seconds that a request may wait.")] = 120.0,
    total_timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 1800.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that running requests have after SIGTERM.")] = 300.0,
    metrics_prefix: Annotated[str, typer.Option(help="Of the names at /metrics; `vllm:` for clients made for vLLM.")] = "echelon:",
) -> None:
    """Serve MODEL to OpenAI clients: /v1/completions, /v1/chat/completions, /v1/models, /metrics and more (docs/serving.md)."""
    try:
        from echelon.server.config import ServerConfig, read_keys
        from echelon.server.http import serve_until_signal
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed; run: pip install 'echelon[server]'") from error
    config = ServerConfig(
        host=host,
        port=port,
        api_keys=read_keys(api_key_file) if api_key_file else (),
        served_model_name=served_model_name,
        max_queue=max_queue,
        queue_timeout=queue_timeout,
        total_timeout=total_timeout,
        drain_timeout=drain_timeout,
        metrics_prefix=metrics_prefix,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    llm = LLM(
        model,
        speculative_mapping(speculative_config),
        dtype=dtype.value,
        device=device.value,
        numerics=numerics.value,
        enforce_eager=enforce_eager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        max_model_len=max_model_len,
        kv_cache_memory_bytes=bytes_or_auto(kv_cache_memory_bytes),
    )
    errors.print(f"{llm.target.name} on http://{host}:{port}/v1", highlight=False)
    if status := serve_until_signal(llm, config):
        _end_process(status)


def _end_process(status: int) -> NoReturn:
    """End without waiting for the threads of an engine that hangs, or of requests that were cut."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
