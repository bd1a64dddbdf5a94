"""How much to speculate in a step: chances of drafted tokens, what a step costs, and the draft that emits most tokens a millisecond."""
