"""Every protection, and the rows of docs/reliability.md for which there is none to take out."""

from collections.abc import Mapping

from tests.protections import (
    Protection,
    backup,
    chat,
    cluster,
    engine,
    models,
    postgres,
    service,
    store,
    tenants,
    wire,
)

PROTECTIONS: tuple[Protection, ...] = (
    *wire.PROTECTIONS,
    *service.PROTECTIONS,
    *tenants.PROTECTIONS,
    *store.PROTECTIONS,
    *postgres.PROTECTIONS,
    *backup.PROTECTIONS,
    *engine.PROTECTIONS,
    *models.PROTECTIONS,
    *chat.PROTECTIONS,
    *cluster.PROTECTIONS,
)

# By one of the tests that the row names: why taking something out would mean nothing.
NOTHING_TO_TAKE_OUT: Mapping[str, str] = {
    "service/test_option_pairs.py::test_every_pair_of_settings_answers_as_it_should": (
        "no code is there for a pair of settings; the test looks for two that do not get along"
    ),
}
