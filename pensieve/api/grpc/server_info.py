"""Describe the served model for clients.

The model's name and fingerprint are known from the start, all other fields after loading. The name of a model
in a folder is the name of the folder, without its path.
"""

from __future__ import annotations

import asyncio
from functools import cache
from importlib import metadata

from pensieve import __version__
from pensieve.conversations.daemon import Daemon
from pensieve.sampling import FLOATS
from pensieve.v1 import conversation_pb2 as pb


def server_info(daemon: Daemon) -> pb.ServerInfo:
    info = pb.ServerInfo(
        model=daemon.engine.model_name,
        fingerprint=daemon.texts.fingerprint,
        state=_state(daemon),
        version=__version__,
        torch_version=version_of("torch"),
        transformers_version=version_of("transformers"),
        uptime_seconds=asyncio.get_running_loop().time() - daemon.started_at,
    )
    for name in (*FLOATS, "top_k", "max_tokens", "stop_repetition"):
        setattr(info.default_sampling, name, getattr(daemon.texts.defaults, name))
    info.defaults_from_model = daemon.texts.defaults_from_model
    if (ready := daemon.engine.ready) is not None:
        info.dtype, info.weights, info.device = ready.dtype, ready.weights, ready.device
        info.kv_dtype = ready.kv_dtype
        info.context_max_tokens, info.layers = ready.context_max, ready.layers
    return info


def log_line(info: pb.ServerInfo) -> str:
    """Return a line for the log; call it after the model is loaded."""
    properties = ", ".join(
        part
        for part in (
            info.dtype,
            "int8 weights" if info.weights == "int8" else "",
            f"{info.kv_dtype} KV" if info.kv_dtype not in ("", info.dtype) else "",
            info.device,
            f"context of {info.context_max_tokens:,} tokens",
            f"fingerprint {info.fingerprint}",
        )
        if part
    )
    program = f"pensieve {info.version}, torch {info.torch_version}"
    program += f", transformers {info.transformers_version}"
    return f"serving {info.model} ({properties}) with {program}"


def _state(daemon: Daemon) -> pb.ServerState.ValueType:
    if daemon.draining:
        return pb.SERVER_STATE_DRAINING
    if daemon.loading:
        return pb.SERVER_STATE_LOADING
    if daemon.store_refusal is not None:
        return pb.SERVER_STATE_READ_ONLY
    return pb.SERVER_STATE_SERVING if daemon.serving else pb.SERVER_STATE_RESTARTING


@cache
def version_of(package: str) -> str:
    """Return the version of an installed package without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
