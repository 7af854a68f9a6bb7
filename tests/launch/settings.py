"""Resolve settings as if each were given as a flag, with an empty environment."""

from __future__ import annotations

from pensieve.config import Settings, resolve


def settings_of(**written: str) -> Settings:
    return resolve(written, {}).settings
