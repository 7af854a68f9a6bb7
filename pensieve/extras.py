"""Packages that may be missing: those of the extras, which only some commands need, and the others.

Where one of an extra is missing, the error says what to install.  In the environment that `scripts/run` has
made, the program that PENSIEVE_ADD_EXTRA names adds it instead, when it is needed first.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib import metadata
from types import ModuleType

from pensieve.errors import ConfigError

DISTRIBUTION = "pensieve-serve"
ADD = "PENSIEVE_ADD_EXTRA"
# Those without which nothing can be served, by the module that has their name in Python.
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "grpc": "grpcio",
    "google": "protobuf",
    "sqlite_utils": "sqlite-utils",
    "jinja2": "jinja2",
    "rich": "rich",
}


def need(extra: str, module: str, purpose: str) -> ModuleType:
    """Import a module of an extra; `purpose` is who needs it, as the beginning of a sentence."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise  # it is there, and lacks something itself
    program = os.environ.get(ADD)
    names = " ".join(f"'{each}'" for each in requirements(extra))
    if not program:
        raise ConfigError(f"{purpose} needs {module.split('.')[0]}: pip install {names}")
    print(f"pensieve: {purpose} needs {names}, which is installed once", file=sys.stderr)
    if subprocess.run([program, extra], stdin=subprocess.DEVNULL, check=False).returncode:
        raise ConfigError(f"{purpose} needs {names}, which could not be installed")
    importlib.invalidate_caches()
    return importlib.import_module(module)


def package_of(error: ModuleNotFoundError) -> str | None:
    """Of what is imported here, the package that has the module which was not found."""
    return PACKAGES.get((error.name or "").split(".")[0])


def requirements(extra: str) -> list[str]:
    """What pip calls the packages of an extra."""
    found = re.compile(r"^(?P<package>[^;]+?) *; .*extra == ['\"](?P<extra>[^'\"]+)['\"]")
    lines = metadata.requires(DISTRIBUTION) or []
    return [
        match["package"]
        for line in lines
        if (match := found.match(line)) is not None and match["extra"] == extra
    ]
