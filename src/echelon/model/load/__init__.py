"""Reading a model from a checkpoint, and the tests that it passes before it is served."""
