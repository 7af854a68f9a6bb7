"""Import a package of an extra. If the package is missing, install it or say what to install.

`scripts/run` sets PENSIEVE_ADD_EXTRA to the path of a program that installs an extra. Without this variable,
a missing package is an error.
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
# Packages that every daemon needs: the name of the module, and the name of the package.
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
    """Import a module of an extra. `purpose` is the subject of the error message."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise  # the module exists, but imports another module that is missing
    program = os.environ.get(ADD)
    names = " ".join(f"'{each}'" for each in requirements(extra))
    if not program:
        raise ConfigError(f"{purpose} needs {module.split('.')[0]}: pip install {names}")
    print(f"pensieve: {purpose} needs {names}; installing it once", file=sys.stderr)
    if subprocess.run([program, extra], stdin=subprocess.DEVNULL, check=False).returncode:
        raise ConfigError(f"{purpose} needs {names}, which could not be installed")
    importlib.invalidate_caches()
    return importlib.import_module(module)


def package_of(error: ModuleNotFoundError) -> str | None:
    """Return the package of the missing module, if it is one of PACKAGES."""
    return PACKAGES.get((error.name or "").split(".")[0])


def requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, in the format of `pip install`."""
    pattern = re.compile(r"^(?P<package>[^;]+?) *; .*extra == ['\"](?P<extra>[^'\"]+)['\"]")
    lines = metadata.requires(DISTRIBUTION) or []
    return [
        match["package"]
        for line in lines
        if (match := pattern.match(line)) is not None and match["extra"] == extra
    ]
