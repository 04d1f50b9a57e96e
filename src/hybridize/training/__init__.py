"""Stages: one piece of training each, on transformers' Trainer. They return records and never evaluate."""
