"""Models of `transformers`: loading, the attention hook, replaced layers, the self-test, and the runner that feeds them."""
