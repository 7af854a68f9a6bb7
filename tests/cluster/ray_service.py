"""A schema of KubeRay's RayService (ray.io/v1) and of a pod: only the fields that docs/cluster uses.

A leaf of the schema is a type. A list has the schema of its elements. `AnyNames` allows any names. Elsewhere,
a name that is not in the schema is reported as a problem, because KubeRay would drop it silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AnyNames:
    """A mapping with any names."""

    schema: Any


@dataclass(frozen=True)
class Is:
    value: str


@dataclass(frozen=True)
class Optional:
    schema: Any


NAME_VALUE = {
    "name": str,
    "value": Optional(str),
    "valueFrom": Optional({"secretKeyRef": {"name": str, "key": str}}),
}
CONTAINER = {
    "name": str,
    "image": str,
    "env": Optional([NAME_VALUE]),
    "ports": Optional([{"name": str, "containerPort": int}]),
    "resources": Optional({"requests": AnyNames(str), "limits": AnyNames(str)}),
    "volumeMounts": Optional([{"name": str, "mountPath": str, "readOnly": Optional(bool)}]),
}
VOLUME = {
    "name": str,
    "secret": Optional({"secretName": str, "defaultMode": Optional(int)}),
    "emptyDir": Optional({}),
}
POD = {
    "spec": {
        "containers": [CONTAINER],
        "terminationGracePeriodSeconds": Optional(int),
        "securityContext": Optional({"fsGroup": int}),
        "volumes": Optional([VOLUME]),
    }
}
RAY_SERVICE = {
    "apiVersion": Is("ray.io/v1"),
    "kind": Is("RayService"),
    "metadata": {"name": str},
    "spec": {
        "upgradeStrategy": Optional({"type": str}),
        "serveConfigV2": str,
        "rayClusterConfig": {
            "rayVersion": Optional(str),
            "authOptions": Optional({"mode": Is("token"), "secretName": Optional(str)}),
            "headGroupSpec": {"rayStartParams": AnyNames(str), "template": POD},
            "workerGroupSpecs": Optional(
                [
                    {
                        "groupName": str,
                        "replicas": Optional(int),
                        "minReplicas": Optional(int),
                        "maxReplicas": Optional(int),
                        "rayStartParams": AnyNames(str),
                        "template": POD,
                    }
                ]
            ),
        },
    },
}


def problems_of(manifest: Any) -> list[str]:
    return list(_problems(manifest, RAY_SERVICE, ""))


def _problems(found: Any, schema: Any, where: str) -> Iterator[str]:
    if isinstance(schema, Optional):
        yield from _problems(found, schema.schema, where)
    elif isinstance(schema, Is):
        if found != schema.value:
            yield f"{where}: not {schema.value!r}"
    elif isinstance(schema, AnyNames):
        if not isinstance(found, dict):
            yield f"{where}: not a mapping"
            return
        for name, value in found.items():
            yield from _problems(value, schema.schema, f"{where}.{name}")
    elif isinstance(schema, list):
        if not isinstance(found, list):
            yield f"{where}: not a list"
            return
        for index, each in enumerate(found):
            yield from _problems(each, schema[0], f"{where}[{index}]")
    elif isinstance(schema, dict):
        if not isinstance(found, dict):
            yield f"{where}: not a mapping"
            return
        for name in found:
            if name not in schema:
                yield f"{where}.{name}: unknown".lstrip(".")
        for name, inner in schema.items():
            path = f"{where}.{name}".lstrip(".")
            if name in found:
                yield from _problems(found[name], inner, path)
            elif not isinstance(inner, Optional):
                yield f"{path}: missing"
    elif not isinstance(found, schema) or (schema is int and isinstance(found, bool)):
        yield f"{where}: not a {'string' if schema is str else schema.__name__}"
