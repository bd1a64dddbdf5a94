"""Passes and steps captured as CUDA graphs. Imports Triton: loaded where a CUDA device serves."""
