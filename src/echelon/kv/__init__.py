"""KV memory: which blocks belong to whom (`blocks`), and the tensors behind them (`cache`)."""
