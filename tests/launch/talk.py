"""Run the command `pensieve`. The first argument replaces the expected digest of the smollm2 wheel."""

import sys

from pensieve.cli.main import main
from pensieve.launch import smollm2

smollm2.WHEEL_SHA256 = sys.argv.pop(1)
sys.exit(main())
