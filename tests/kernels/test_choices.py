"""What a measurement on a GPU decides can be switched by the environment."""

from __future__ import annotations

import pytest

from pensieve.errors import InvalidArgument
from pensieve.kernels import choices


def test_what_is_named_is_chosen_and_the_rest_keeps_its_default() -> None:
    assert choices.of_text("") == choices.Choices()
    assert choices.of_text("snake=0, wide_blocks=2") == choices.Choices(snake=0, wide_blocks=2)


@pytest.mark.parametrize("text", ["snakes=1", "snake", "snake=yes", "snake=-1"])
def test_a_choice_that_is_none_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"PENSIEVE_GPU_CHOICES.*snake=NUMBER"):
        choices.of_text(text)


@pytest.mark.parametrize("text", ["copy_blocks=0", "wide_blocks=0"])
def test_a_number_of_blocks_is_at_least_one(text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"PENSIEVE_GPU_CHOICES.*{text}.*at least 1"):
        choices.of_text(text)


@pytest.mark.parametrize("text", ["snake=2", "fused=10", "hopper=3"])
def test_a_switch_is_zero_or_one(text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"PENSIEVE_GPU_CHOICES.*{text}.*0 or 1"):
        choices.of_text(text)
