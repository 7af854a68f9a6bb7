"""Run `pensieve serve` with JSON parameters that have no setting: fields of its config or listening objects.

python -m tests.conversations.serve_with '{"config": {"heartbeat_seconds": 2.0}}' --data DIR
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from pensieve.cli.main import main
from pensieve.config import Resolved
from pensieve.launch import daemon

original_setup = daemon.setup_to_serve


def setup_with_parameters(resolved: Resolved) -> daemon.DaemonSetup:
    setup = original_setup(resolved)
    fields = {part: replace(getattr(setup, part), **values) for part, values in given.items()}
    return replace(setup, **fields)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    daemon.setup_to_serve = setup_with_parameters
    sys.exit(main(["serve", *sys.argv[2:]]))
