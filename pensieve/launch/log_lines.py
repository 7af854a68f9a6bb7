"""Writes a daemon's log to standard error, as lines of text or of JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

SUBJECTS = ("turn_id", "conversation_id", "tenant")  # what a line may be about


def log_to_stderr(form: str) -> None:
    """`form` is text, json, or auto."""
    handler = logging.StreamHandler(sys.stderr)
    plain = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler.setFormatter(_TextLines() if plain else _JsonLines())
    root = logging.getLogger("pensieve")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


def _subjects(record: logging.LogRecord) -> dict[str, str]:
    return {name: getattr(record, name) for name in SUBJECTS if hasattr(record, name)}


class _TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        about = "".join(f" {name}={value}" for name, value in _subjects(record).items())
        return super().formatMessage(record) + about


class _JsonLines(logging.Formatter):
    """One JSON object per line; what a message quotes is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_subjects(record),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry)
