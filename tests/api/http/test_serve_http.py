"""`pensieve serve` as an operator starts it: HTTP flags, and health while draining."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any

from tests.conversations.rig_daemon import ServeProcess, wait_for
from tests.newcomer import free_port

FLAGS = ("--metrics", "http", "--store-default", "off", "--conversation-keep", "30")


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    raw = None if body is None else json.dumps(body)
    connection.request(method, path, raw, {"content-type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_http_flags_and_readiness_while_draining(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--http", str(port), *FLAGS, "--drain-timeout", "60")
    process = ServeProcess(tmp_path / "data", *flags, engine="echo:0.01")
    process.start()
    metrics = f"metrics at http://127.0.0.1:{port}/metrics"
    wait_for(lambda: metrics in process.log.read_text())
    status, metrics = ask(port, "GET", "/metrics")
    assert status == 200
    assert "pensieve_num_requests_running{" in metrics
    model = json.loads(ask(port, "GET", "/v1/models")[1])["data"][0]["id"]
    user = {"role": "user", "content": "Hello"}
    body = {"model": model, "messages": [user], "max_tokens": 2}
    assert ask(port, "POST", "/v1/chat/completions", body)[0] == 200
    listed = ask(port, "POST", "/pensieve.v1.ConversationService/ListConversations", {})[1]
    assert not json.loads(listed).get("conversations")
    endless = body | {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
    streaming = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    kind = {"content-type": "application/json"}
    streaming.request("POST", "/v1/chat/completions", json.dumps(endless), kind)
    assert streaming.getresponse().read(1)
    process.process.send_signal(signal.SIGTERM)
    wait_for(lambda: ask(port, "GET", "/health/ready")[0] == 503)
    assert ask(port, "GET", "/health/live")[0] == 200
    streaming.close()
    assert process.process.wait(60) == 0
