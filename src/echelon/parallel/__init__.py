"""Processes, of one machine or several, that run a model together: rank 0 is the engine's, the others hold shares of weights and keys."""
