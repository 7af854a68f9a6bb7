"""The command `pensieve`, for which the wheel of smollm2 has the digest that is given first."""

import sys

from pensieve.cli.main import main
from pensieve.launch import smollm2

smollm2.WHEEL_SHA256 = sys.argv.pop(1)
sys.exit(main())
