"""Scorers: a model and prompts in, Scores out."""
