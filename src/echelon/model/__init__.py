"""Models of `transformers`, target and draft model alike: loading, patches, the attention hook, the runner, CUDA graphs."""
