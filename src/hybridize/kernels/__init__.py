"""Triton twins of the operators' hot loops, same results as the torch reference; `dispatch` is the one place that chooses."""
