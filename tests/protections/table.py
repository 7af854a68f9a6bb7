"""Every protection, and the rows of docs/reliability.md for which there is none to take out."""

from collections.abc import Mapping

from tests.protections import Protection, engine, service, store, wire

PROTECTIONS: tuple[Protection, ...] = (
    *wire.PROTECTIONS,
    *service.PROTECTIONS,
    *store.PROTECTIONS,
    *engine.PROTECTIONS,
)

# By one of the tests that the row names: why taking something out would mean nothing.
NOTHING_TO_TAKE_OUT: Mapping[str, str] = {}
