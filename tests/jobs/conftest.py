"""Use the fixtures of the store's tests: a folder in memory, and each available SQLite driver."""

from tests.store.conftest import driver, pytest_generate_tests, tmp_path

__all__ = ["driver", "pytest_generate_tests", "tmp_path"]
