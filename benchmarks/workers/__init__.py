"""Scripts that run a job on another system, each with that system's own Python; see `peers`."""
