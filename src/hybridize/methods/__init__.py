"""One file a method: a scorer, a budget rule, operators and stages."""
