"""Settings as a configuration file and the environment give them."""

from __future__ import annotations

from pensieve.config import Settings, resolve


def settings_of(**written: str) -> Settings:
    return resolve(written, {}).settings
