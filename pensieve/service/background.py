"""What a daemon tells whoever has background turns in its engine (service/jobs); this one has none."""

from __future__ import annotations

from pensieve.engine.messages import Event


class Background:
    """Belongs to the loop."""

    def engine_started(self) -> None:
        """Turns may be put; nothing is in its cache."""

    def engine_lost(self) -> None:
        """And with it all turns."""

    def take(self, event: Event) -> bool:
        """Whether it was an event of a background turn."""
        return False

    def go(self) -> None:
        """A frame of events was taken."""

    def drain(self) -> None:
        """The daemon takes no new turns."""

    async def close(self) -> None:
        """The engine is about to be stopped."""
