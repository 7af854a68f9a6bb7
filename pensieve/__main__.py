"""Run the command line as `python -m pensieve`."""

import sys

from pensieve.cli.main import main

sys.exit(main())
