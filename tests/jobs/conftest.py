"""A folder in memory, and each SQLite there is, as the tests of the store have them."""

from tests.store.conftest import driver, pytest_generate_tests, tmp_path

__all__ = ["driver", "pytest_generate_tests", "tmp_path"]
