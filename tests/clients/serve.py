"""Run `pensieve serve` with a scripted engine. Arguments: SCRIPT, then the flags of serve."""

from __future__ import annotations

import sys

from pensieve.cli.main import main
from pensieve.launch import programs

if __name__ == "__main__":
    script, *flags = sys.argv[1:]
    programs.ENGINE = (sys.executable, "-m", "tests.conversations.scripted_engine", script)
    sys.exit(main(["serve", *flags]))
