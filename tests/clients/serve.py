"""`pensieve serve` with an engine that says what a script has it say: SCRIPT and then its own flags."""

from __future__ import annotations

import sys

from pensieve.cli.main import main
from pensieve.launch import programs

if __name__ == "__main__":
    script, *flags = sys.argv[1:]
    programs.ENGINE = (sys.executable, "-m", "tests.conversations.scripted_engine", script)
    sys.exit(main(["serve", *flags]))
