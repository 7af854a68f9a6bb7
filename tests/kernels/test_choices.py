"""Environment settings that switch off GPU features that misbehave."""

from __future__ import annotations

import pytest

from pensieve.errors import InvalidArgument
from pensieve.kernels import choices


def test_unnamed_choices_keep_their_defaults() -> None:
    assert choices.of_text("") == choices.Choices()
    assert choices.of_text("hopper=0, watchdog=1") == choices.Choices(hopper=0, watchdog=1)


@pytest.mark.parametrize(
    "text", ["hoppers=1", "snake=0", "hopper", "hopper=yes", "hopper=-1", "radix=2", "hopper=10"]
)
def test_an_unknown_choice_is_refused_with_a_list_of_the_known_ones(text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"PENSIEVE_GPU_CHOICES.*{text}.*hopper=0 or 1"):
        choices.of_text(text)
