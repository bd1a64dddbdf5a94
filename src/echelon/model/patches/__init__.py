"""What replaces parts of a loaded `transformers` model: linear layers, norms, rotary embeddings, experts, decoder layers."""
