"""Batched speculative decoding of large language models: no padding, no realignment, the same text."""

from importlib.metadata import version

from echelon.aio.async_llm import AsyncLLM
from echelon.config import EngineConfig, SpeculativeConfig
from echelon.errors import ConfigError, EchelonError, ModelLoadError, RequestError, UnsupportedModelError
from echelon.llm import LLM
from echelon.model.load.loading import load_model
from echelon.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from echelon.sampling import SamplingParams

__version__ = version("echelon")

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
