"""A daemon with an HTTP server, and plain requests to it."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.guard.exposure import Listening
from tests.conversations.rig_daemon import DaemonRig

MODEL = "builtin"
MODEL_ENGINE = (sys.executable, "-m", "pensieve.launch.engine_process")
MODEL_SETTINGS = {"threads": "1", "device_cache": "8192t", "host_cache": "16384t"}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.value["error"]

    @property
    def events(self) -> list[Any]:
        """Return the events of a stream. The last event is [DONE] if the API sends it."""
        lines = self.body.decode().split("\n\n")
        data = [line.partition("data: ")[2] for line in lines if "data: " in line]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


class HttpRig:
    def __init__(self, rig: DaemonRig) -> None:
        self.rig = rig
        (listener,) = rig.server.other_listeners
        self.url = listener.url
        self.address = listener.url.removeprefix("http://")

    def connection(self, seconds: float = 60.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=seconds)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request. A `body` of bytes is sent unchanged, any other value as JSON."""
        connection = self.connection()
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {"content-type": "application/json"} if raw is not None else {}
        connection.request(method, path, raw, {**kind, **(headers or {})})
        found = connection.getresponse()
        answer = Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        connection.close()
        return answer

    def chat(
        self, *contents: str, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Answer:
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": each}
            for number, each in enumerate(contents)
        ]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, **fields}
        return self.ask("POST", "/v1/chat/completions", body, headers)


@contextmanager
def http_rig(
    data: Path,
    *,
    model: bool = False,
    settings: Mapping[str, str] = MODEL_SETTINGS,
    **arguments: Any,
) -> Iterator[HttpRig]:
    """Start a daemon. With `model`, it runs the built-in model with `settings`, else the echo engine."""
    if model:
        arguments |= {"program": MODEL_ENGINE, "written": dict(settings)}
    options = {"http": "127.0.0.1:0", **arguments.pop("http", {})}
    if (limits := arguments.pop("limits", None)) is not None:
        arguments["config"] = DaemonConfig(grace_seconds=0.2, limits=limits)
    listening = Listening("127.0.0.1:0", data / "admin.sock", **options)
    with DaemonRig(data, listening=listening, **arguments) as rig:
        yield HttpRig(rig)
