"""Training: text, losses and loops for everything in echelon that has parameters. Never imports the engine."""
