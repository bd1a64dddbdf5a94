"""Batched speculative decoding of large language models: no padding, no realignment, the same text."""

from echelon.api import LLM, CompletionOutput, RequestMetrics, RequestOutput
from echelon.config import EngineConfig, SpeculativeConfig
from echelon.errors import ConfigError, EchelonError, ModelLoadError, RequestError, UnsupportedModelError
from echelon.sampling import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EchelonError",
    "EngineConfig",
    "ModelLoadError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "UnsupportedModelError",
]
