"""The amount of random and exhaustive testing: `PENSIEVE_TEST_SCALE=20 scripts/test tests/core`.

`PENSIEVE_TEST_SEED` is the first seed, for tests that need not be the same each time (tests/nightly.py).
"""

import os

SCALE = int(os.environ.get("PENSIEVE_TEST_SCALE", "1"))
SEED = int(os.environ.get("PENSIEVE_TEST_SEED", "0"))
