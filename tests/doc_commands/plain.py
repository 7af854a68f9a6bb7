"""An environment with only the packages that `scripts/run` installs, inside the development environment.

Modules of other packages cannot be imported there. The modules of an extra become importable after a call of
PENSIEVE_ADD_EXTRA. `scripts/run` calls it to install an extra at its first use. Here the call only leaves a
marker file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = {"pensieve-serve", "pip", "setuptools"}
HIDING = """
import json, os, sys
from importlib.machinery import PathFinder

with open(os.environ["PLAIN_HIDDEN"]) as file:
    HIDDEN = json.load(file)
ADDED = os.environ["PLAIN_ADDED"]

class Plain(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        extras = HIDDEN.get(name.partition(".")[0])
        if extras is not None and not any(map(os.path.exists, (ADDED + each for each in extras))):
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [Plain if each is PathFinder else each for each in sys.meta_path]
"""
ADDING = """#!/bin/sh
for extra; do : >"$PLAIN_ADDED$extra"; done
"""


def plain_environment(folder: Path) -> dict[str, str]:
    """Return the environment's variables. `folder` gets the files that it needs."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDING)
    (folder / "hidden.json").write_text(json.dumps(hidden()))
    add = folder / "add_extra"
    add.write_text(ADDING)
    add.chmod(0o755)
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "PLAIN_HIDDEN": str(folder / "hidden.json"),
        "PLAIN_ADDED": str(folder / "extra-"),
        "PENSIEVE_ADD_EXTRA": str(add),
    }


def hidden() -> dict[str, list[str]]:
    """Return the modules to hide, each with the extras that contain its package."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    base = needed(project["dependencies"]) | ALWAYS
    extras = {
        name: needed(packages)
        for name, packages in project["optional-dependencies"].items()
        if name != "dev"
    }
    found = {}
    for module, names in metadata.packages_distributions().items():
        packages = {normal(name) for name in names}
        if not packages & base and module.isidentifier():
            found[module] = [extra for extra, brings in extras.items() if packages & brings]
    return found


def needed(requirements: list[str]) -> set[str]:
    """Return the installed packages that these requirements need, directly or indirectly."""
    found: set[str] = set()
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        wanted = waiting.pop()
        name = normal(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for each in map(Requirement, requires):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                waiting.append(each)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
