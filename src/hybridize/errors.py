"""The one error type for bad input; the CLI turns it into a message and exit code 2."""

from __future__ import annotations

from typing import Any


class HybridizeError(ValueError):
    """Bad input. The message names the field, what was got and what is expected."""


def bad(field: str, got: Any, expected: str) -> HybridizeError:
    """Build the error for one field, so that every message has the same shape."""
    return HybridizeError(f"{field}: got {got!r}, expected {expected}")
