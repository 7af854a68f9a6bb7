"""The keys by which ranks find each other when they enter the process group: rank 0 has them.

    rank 0   init_process_group ── RankStore ──> Keys <── the thread that receives from rank n
    rank n   init_process_group ── RankStore ── pipe ──────────────┘

torch.distributed wants a store of keys, where each rank writes where it can be reached.  Its own (a file, a
TCP server) either need a folder that all share or let in whoever reaches their port.  Ours goes over the
pipes that rank 0 has to every rank already: those are socket pairs, or connections of ranks that have
proved that they know the secret (handshake.py).  So nobody else can read a key, or write one.

An answer is immediate: whoever waits for a key asks again.  That is a matter of a few keys, when ranks start.
When a rank ends, rank 0 gives up (`Keys.give_up`), and whoever waits there has an error at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pensieve.errors import DeviceError

ASK_AGAIN_SECONDS = 0.005
WAIT_SECONDS = 60.0
KEYS_MAX = 1 << 16


class Keys:
    """Values by key; any thread may call."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._reason: str | None = None

    def answer(self, verb: str, key: str, value: str) -> str | None:
        """What a rank gets for a verb; bytes are written as Latin-1, and None is no such key."""
        given = value.encode("latin-1")
        with self._lock:
            if self._reason is not None:
                raise DeviceError(self._reason)
            before = self._values.get(key)
            if verb == "set":
                self._put(key, given)
                return ""
            if verb == "get":
                return None if before is None else before.decode("latin-1")
            if verb == "add":
                self._put(key, str(int(before or b"0") + int(given)).encode())
                return self._values[key].decode()
            if verb == "delete":
                return None if self._values.pop(key, None) is None else ""
            if verb == "count":
                return str(len(self._values))
        raise ValueError(f"a store of ranks has no {verb!r}")

    def give_up(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason

    def _put(self, key: str, value: bytes) -> None:
        if len(self._values) >= KEYS_MAX and key not in self._values:
            raise ValueError("a store of ranks is full")
        self._values[key] = value


Ask = Callable[[str, str, str], str | None]  # as Keys.answer


class RankStore(Store):
    """What torch.distributed sees; it calls by these names, from threads of its own too."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", key, value if isinstance(value, str) else bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._ask("get", key, "")
        assert value is not None
        return value.encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        total = self._ask("add", key, str(amount))
        assert total is not None
        return int(total)

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("get", key, "") is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = WAIT_SECONDS if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        for key in keys:
            while self._ask("get", key, "") is None:
                if time.monotonic() > until:
                    raise dist.DistStoreError(f"no rank has written {key} within {seconds:.0f} s")
                time.sleep(ASK_AGAIN_SECONDS)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key, "") is not None

    def num_keys(self) -> int:
        return int(self._ask("count", "", "") or 0)
