"""An OpenAI-compatible HTTP server on one engine."""
