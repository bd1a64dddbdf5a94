"""The engine in a thread of its own, for programs that run an event loop."""
