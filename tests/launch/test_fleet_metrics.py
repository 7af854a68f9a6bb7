"""Metrics of several replicas at one address: health, who may read them, and how long a scrape takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pensieve.client.fleet import FixedReplicas, Fleet, Replica
from pensieve.conversations.daemon_config import DaemonConfig
from pensieve.errors import ConfigError, InvalidArgument
from pensieve.launch.fleet_metrics import FleetMetrics
from tests.conversations.rig_daemon import DaemonRig
from tests.newcomer import free_port


async def get(address: str, path: str) -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body.decode()


def test_health_reports_the_result_of_the_latest_scrape(tmp_path: Path) -> None:
    async def look(replica: Replica) -> list[int]:
        async with Fleet(FixedReplicas([replica]), seconds=3.0) as fleet:
            serving = FleetMetrics(fleet)
            address = await serving.listen("127.0.0.1:0")
            codes = [(await get(address, "/health"))[0]]
            code, text = await get(address, "/metrics")
            up = f'pensieve_replica_up{{replica="{replica.name}"}} '
            assert code == 200
            codes.append(int(text.partition(up)[2][0]))
            codes.append((await get(address, "/health"))[0])
            await serving.close()
            return codes

    config = DaemonConfig(grace_seconds=0.2, replica="here")
    with DaemonRig(tmp_path / "data", config=config):
        here = Replica("here", f"unix:{tmp_path / 'data' / 'admin.sock'}")
        assert asyncio.run(look(here)) == [200, 1, 200]
    assert asyncio.run(look(Replica("gone", f"127.0.0.1:{free_port()}"))) == [200, 0, 503]


def test_listening_for_other_machines_needs_the_insecure_flag() -> None:
    async def listen(address: str, insecure: bool) -> str:
        async with Fleet(FixedReplicas([Replica("a", "h:1")]), seconds=3.0) as fleet:
            serving = FleetMetrics(fleet)
            try:
                return await serving.listen(address, insecure)
            finally:
                await serving.close()

    with pytest.raises(ConfigError, match="can be reached by others"):
        asyncio.run(listen("0.0.0.0:0", False))
    assert asyncio.run(listen("0.0.0.0:0", True)).startswith("0.0.0.0:")


def test_a_replica_timeout_longer_than_a_scrape_is_refused() -> None:
    async def serve() -> None:
        async with Fleet(FixedReplicas([Replica("a", "h:1")]), seconds=4.0) as fleet:
            FleetMetrics(fleet)

    with pytest.raises(InvalidArgument, match=r"3\.5"):
        asyncio.run(serve())
