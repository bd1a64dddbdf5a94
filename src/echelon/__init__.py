"""Batched speculative decoding of large language models: no padding, no realignment, the same text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.aio.async_llm import AsyncLLM
    from echelon.config import EngineConfig
    from echelon.errors import ConfigError, EchelonError, ModelLoadError, RequestError, UnsupportedModelError
    from echelon.llm import LLM
    from echelon.model.load.loading import load_model
    from echelon.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from echelon.sampling import SamplingParams
    from echelon.speculative_config import SpeculativeConfig

    __version__: str

HOMES = {
    "LLM": "llm",
    "AsyncLLM": "aio.async_llm",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "EchelonError": "errors",
    "EngineConfig": "config",
    "Logprob": "outputs",
    "ModelLoadError": "errors",
    "RequestError": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling",
    "SpeculativeConfig": "speculative_config",
    "UnsupportedModelError": "errors",
    "load_model": "model.load.loading",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "EchelonError",
    "EngineConfig",
    "Logprob",
    "ModelLoadError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "UnsupportedModelError",
    "__version__",
    "load_model",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for: PyTorch and transformers take seconds, which the help of a command need not wait for."""
    if name == "__version__":
        return import_module(f"{__name__}.release").version()
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
