"""How rows become a batch. `unpadded` concatenates them."""
