"""How much of the random and enumerated testing is done: `PENSIEVE_TEST_SCALE=20 scripts/test tests/core`."""

import os

SCALE = int(os.environ.get("PENSIEVE_TEST_SCALE", "1"))
