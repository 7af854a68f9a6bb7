"""What clients see of an error: its text, details, and when to retry."""

from __future__ import annotations

from pensieve.errors import (
    AddressInUse,
    ConfigError,
    ContextFull,
    DeviceError,
    DiskFull,
    Loading,
    ModelError,
    OwnedElsewhere,
    PensieveError,
    QueueFull,
    StaleRevision,
    StoreError,
    StoreUnavailable,
    TurnRunning,
    Unavailable,
    shortened,
)

# Seconds until a retry, by class; the first matching class counts. Clients add their own backoff.
RETRY_SECONDS = {QueueFull: 1.0, Loading: 1.0, Unavailable: 0.2}
# What clients get instead of a text that is only for the log; the first matching class counts.
GENERIC_TEXTS = {
    StoreUnavailable: "the history cannot be read or written at present",
    StoreError: "the stored history cannot be used",
    ModelError: "the model cannot do this",
    DeviceError: "the device failed",
    ConfigError: "the daemon is not set up for this",
    AddressInUse: "the daemon is not set up for this",
}
DISK_FULL = (
    "the disk of the history is full; conversations can be read and deleted, but not changed"
)


def client_text(error: PensieveError) -> str:
    """Return the error's text in one line, without details that only the operator may know."""
    if is_for_the_log(error):
        if isinstance(error, DiskFull):
            return DISK_FULL
        texts = GENERIC_TEXTS.items()
        text = next(text for kind, text in texts if isinstance(error, kind))
        return f"{text}; the daemon's log says more"
    return shortened(str(error))


def is_for_the_log(error: PensieveError) -> bool:
    """Return whether the error's text is only for the log, because it may name files of this machine."""
    return isinstance(error, tuple(GENERIC_TEXTS))


def retry_seconds(error: PensieveError) -> float | None:
    """Return the seconds after which a retry may succeed; None if unknown."""
    if error.retry_after_seconds is not None:
        return error.retry_after_seconds
    found = (seconds for kind, seconds in RETRY_SECONDS.items() if isinstance(error, kind))
    return next(found, None)


def details(error: PensieveError) -> dict[str, str]:
    """Return the error's details for programs, by name."""
    if isinstance(error, TurnRunning):
        return {"conversation_id": error.conversation_id, "turn_id": error.turn_id}
    if isinstance(error, OwnedElsewhere):
        return {
            "conversation_id": error.conversation_id,
            "replica": error.replica,
            "address": error.address,
        }
    if isinstance(error, StaleRevision):
        return {"expected": str(error.expected), "actual": str(error.actual)}
    if isinstance(error, ContextFull):
        return {"tokens": str(error.tokens), "tokens_max": str(error.tokens_max)}
    if isinstance(error, QueueFull) and error.limit:
        return {"limit": error.limit}
    return {}
