"""Files of models and heads: found, confined to their folder, checked while they are read, and never mapped into memory."""
