"""`pensieve serve` with parameters that have no flag, as JSON: settings, or fields of config or listening.

python -m tests.service.serve_with '{"config": {"heartbeat_seconds": 2.0}}' --data DIR
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from pensieve.cli import flags
from pensieve.cli.main import main
from pensieve.config import Resolved, Serving, resolve
from pensieve.launch import daemon

made = daemon.setup_to_serve


def changed(resolved: Resolved, serving: Serving) -> daemon.DaemonSetup:
    setup = made(resolved, serving)
    fields = {part: replace(getattr(setup, part), **values) for part, values in given.items()}
    return replace(setup, **fields)


def resolved(internal: dict[str, str], given: dict[str, Any], *rest: Any) -> Resolved:
    return resolve({**given, **internal}, *rest)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    vars(flags)["resolve"] = partial(resolved, given.pop("settings", {}))
    daemon.setup_to_serve = changed
    sys.exit(main(["serve", *sys.argv[2:]]))
