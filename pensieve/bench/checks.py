"""Checks results before a bench times anything, so that no wrong result gets a figure."""

from __future__ import annotations

import torch

from pensieve.errors import PensieveError


def check_close(
    name: str,
    answer: torch.Tensor,
    right: torch.Tensor,
    tolerance: dict[torch.dtype, float],
    where: str = "",
) -> float:
    """How far an answer is from the one in float32; an error if that is too far for its type."""
    worst = float((answer.float() - right).abs().max())
    if not worst <= tolerance[answer.dtype]:  # nor NaN
        raise PensieveError(f"{name} is off by {worst}{where}")
    return worst
