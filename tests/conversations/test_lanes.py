"""Several store threads: jobs of a conversation keep their order, and other conversations do not wait."""

from __future__ import annotations

import asyncio
import threading

from pensieve.conversations.threads import Threads

NUM_LANES = 4
NAMES = [f"c{number}" for number in range(40)]


def test_jobs_of_a_conversation_run_in_order_in_one_thread() -> None:
    async def main() -> None:
        threads = Threads(asyncio.get_running_loop(), 1, num_lanes=NUM_LANES)
        ran: dict[str, list[tuple[int, int]]] = {name: [] for name in NAMES}

        def job(name: str, number: int) -> None:
            ran[name].append((number, threading.get_ident()))

        await asyncio.gather(
            *(threads.in_store("", job, name, n, lane=name) for n in range(20) for name in NAMES)
        )
        for jobs in ran.values():
            assert [number for number, _ in jobs] == list(range(20))
            assert len({thread for _, thread in jobs}) == 1
        assert len({thread for jobs in ran.values() for _, thread in jobs}) == NUM_LANES
        await threads.close()

    asyncio.run(main())


def test_a_blocked_job_delays_only_its_lane_and_the_store_health_check() -> None:
    async def main() -> None:
        threads = Threads(asyncio.get_running_loop(), 1, num_lanes=NUM_LANES)
        release, done = threading.Event(), list[str]()
        blocked = asyncio.ensure_future(threads.in_store("a", release.wait, lane=NAMES[0]))
        queued = asyncio.ensure_future(threads.in_store("a", done.append, "x", lane=NAMES[0]))
        answers = [
            asyncio.ensure_future(threads.in_store("a", done.append, name, lane=name))
            for name in NAMES[1:]
        ]
        while len(done) < len(NAMES) // 2:
            await asyncio.sleep(0.001)
        assert threads.store_waiting.num_jobs >= 2
        assert threads.store_waiting.oldest_seconds > 0
        health = asyncio.ensure_future(threads.wait_for_store())
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in (health, queued))
        release.set()
        await asyncio.gather(blocked, queued, health, *answers)
        assert sorted(done) == sorted(["x", *NAMES[1:]])
        await threads.close()

    asyncio.run(main())


def test_calls_without_a_conversation_share_a_thread() -> None:
    async def main() -> None:
        threads = Threads(asyncio.get_running_loop(), 1, num_lanes=NUM_LANES)
        tenants = [f"t{number}" for number in range(20)]
        asked = (threads.in_store(tenant, threading.get_ident) for tenant in tenants)
        assert len(set(await asyncio.gather(*asked))) == 1
        await threads.close()

    asyncio.run(main())
