"""The public face: what `import echelon` offers, and that every public thing says what it is."""

from __future__ import annotations

import inspect

import echelon


def test_public_names() -> None:
    assert echelon.__all__ == [
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
    for name in echelon.__all__:
        assert inspect.getdoc(getattr(echelon, name)), name


def test_every_error_is_ours() -> None:
    for name in echelon.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(echelon, name), echelon.EchelonError)


def test_sampling_defaults_are_those_of_vllm() -> None:
    params = echelon.SamplingParams()
    expected = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "max_tokens": 16, "ignore_eos": False}
    assert {k: getattr(params, k) for k in expected} == expected
