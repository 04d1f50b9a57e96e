"""Attention operators. `specs` is plain data (no torch); each operator's maths and state have a file of their own."""
