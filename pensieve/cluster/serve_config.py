"""The configuration of a cluster in Ray Serve's YAML format: read a file, or generate one for one machine.

The same file works with `serve deploy`, and as `serveConfigV2` of KubeRay's RayService.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from pensieve.cluster.settings import REPLICA, settings_of
from pensieve.errors import ConfigError

APPLICATION = "pensieve"
GENERATION = "PENSIEVE_GENERATION"
BUILD = "pensieve.cluster.deployments:build"
SERVICES = "pensieve.cluster.grpc_edge:add_services"

LISTENING = ("host", "port")


def read(path: Path) -> ServeDeploySchema:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    return checked(found, str(path))


def checked(found: Any, where: str) -> ServeDeploySchema:
    """Check the configuration as far as possible without starting anything."""
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not a Ray Serve configuration")
    try:
        config = ServeDeploySchema.model_validate(found)
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: {_first_problem(error)}") from error
    ours = [each for each in config.applications if each.import_path == BUILD]
    if len(ours) != 1 or len(config.applications) != 1:
        raise ConfigError(f"{where}: needs one application, with import_path {BUILD}")
    if SERVICES not in config.grpc_options.grpc_servicer_functions:
        raise ConfigError(f"{where}: grpc_options.grpc_servicer_functions needs {SERVICES}")
    settings_of(ours[0].args)
    return config


def local(
    num_replicas: int, folder: Path, grpc_port: int, http_port: int, args: dict[str, Any]
) -> Any:
    """Return a configuration for replicas on this machine, which share its cores and memory."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    serve = {
        "threads": max(1, cores // num_replicas),
        "device_cache": f"{25 // num_replicas}%",
        "host_cache": f"{25 // num_replicas}%",
        **args.pop("serve", {}),
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": http_port},
        "grpc_options": {"port": grpc_port, "grpc_servicer_functions": [SERVICES]},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": BUILD,
                "args": {
                    "replicas": num_replicas,
                    "data": str(folder / "history"),
                    "local": True,
                    "cpus": 0,
                    **args,
                    "serve": serve,
                },
            }
        ],
    }


def check_options(config: ServeDeploySchema, details: Mapping[str, Any]) -> None:
    """Raise ConfigError if Serve runs with other proxy options than `config`. `details` is Ray's report.

    Options that the file does not set are not compared, except the listening address, which
    `pensieve cluster up` prints.
    """
    differing = []
    location = details.get("proxy_location")
    if location is not None and _plain(location) != _plain(config.proxy_location):
        differing.append("proxy_location")
    for name in ("http_options", "grpc_options"):
        wanted, found = getattr(config, name), details.get(name) or {}
        differing += [
            f"{name}.{each}"
            for each in sorted({*wanted.model_fields_set, *LISTENING})
            if each in found and found[each] != getattr(wanted, each)
        ]
    if differing:
        raise ConfigError(
            f"{', '.join(differing)}: Ray Serve is running with other values and cannot change them while "
            "it runs. Run `pensieve cluster down` first"
        )


def with_next_generation(application: dict[str, Any]) -> dict[str, Any]:
    """Return the application's configuration with the next generation number.

    The number is in an environment variable. Because it changes, Ray replaces every replica.
    """
    return _with_generation(application, int(_generation(application) or "0") + 1)


def with_generation_of(
    running: Mapping[str, Any] | None, config: ServeDeploySchema
) -> ServeDeploySchema:
    """Return the configuration with the generation number of the running application.

    With another number, all replicas would restart.
    """
    generation = _generation(running or {})
    if not generation:
        return config
    written = config.model_dump(exclude_unset=True)
    written["applications"] = [
        _with_generation(each, int(generation)) for each in written["applications"]
    ]
    return ServeDeploySchema.model_validate(written)


def _generation(application: Mapping[str, Any]) -> str:
    """Return the generation number; "" if `pensieve cluster roll` has never run."""
    for each in application.get("deployments") or ():
        if each["name"] == REPLICA:
            options = each.get("ray_actor_options") or {}
            variables = (options.get("runtime_env") or {}).get("env_vars") or {}
            return str(variables.get(GENERATION, ""))
    return ""


def _with_generation(application: Mapping[str, Any], generation: int) -> dict[str, Any]:
    deployments = [dict(each) for each in application.get("deployments") or ()]
    replica = next((each for each in deployments if each["name"] == REPLICA), None)
    if replica is None:
        replica = {"name": REPLICA}
        deployments.append(replica)
    options = dict(replica.get("ray_actor_options") or {})
    environment = dict(options.get("runtime_env") or {})
    variables = dict(environment.get("env_vars") or {})
    variables[GENERATION] = str(generation)
    replica["ray_actor_options"] = {
        **options,
        "runtime_env": {**environment, "env_vars": variables},
    }
    return {**application, "deployments": deployments}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(each) for each in first['loc'])}: {first['msg']}"
    return str(error)
