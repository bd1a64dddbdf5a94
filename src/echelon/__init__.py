"""Batched speculative decoding of large language models: no padding, no realignment, the same text."""

from echelon.config import EngineConfig, SpeculativeConfig
from echelon.errors import ConfigError, EchelonError, ModelLoadError, RequestError, UnsupportedModelError
from echelon.llm import LLM
from echelon.model.load.loading import load_model
from echelon.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from echelon.sampling import SamplingParams

__all__ = [
    "LLM",
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
    "load_model",
]
