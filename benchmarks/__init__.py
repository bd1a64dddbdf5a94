"""Measurements of this project's own tables and proofs; no part of the package. `python -m benchmarks.NAME --help` says what each does."""
