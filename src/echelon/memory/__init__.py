"""What the engine keeps in memory: counted before anything is loaded, fitted to a budget, and shared out as keys and values."""
