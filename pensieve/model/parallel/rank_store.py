"""Hold, on rank 0, the key-value store in which ranks find each other when they enter the process group.

    rank 0   init_process_group ── RankStore ──> Keys <── the thread that receives from rank n
    rank n   init_process_group ── RankStore ── pipe ──────────────┘

torch.distributed needs a store of keys, where each rank writes its address.  Torch's own stores need a folder
that all ranks share (file) or accept any client that reaches their port (TCP server).  This store uses the
pipes between rank 0 and every rank: socket pairs, or connections of ranks that have proved that they know the
secret (handshake.py).  So nobody else can read or write a key.

Rank 0 answers at once; a rank that waits for a key polls.  There are only a few keys, at the start.  When a
rank ends, rank 0 gives up (`Keys.give_up`), and every waiting rank gets an error at once.
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
    """Store values by key; any thread may call."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._reason: str | None = None

    def answer(self, verb: str, key: str, value: str) -> str | None:
        """Run a rank's request; bytes are encoded as Latin-1, and None means that the key is missing."""
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
        raise ValueError(f"unknown request to the rank store: {verb!r}")

    def give_up(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason

    def _put(self, key: str, value: bytes) -> None:
        if len(self._values) >= KEYS_MAX and key not in self._values:
            raise ValueError("the rank store is full")
        self._values[key] = value


KeyRequest = Callable[[str, str, str], str | None]  # as Keys.answer


class RankStore(Store):
    """Serve torch.distributed, which calls these methods, also from its own threads."""

    def __init__(self, ask: KeyRequest) -> None:
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
        deadline = time.monotonic() + seconds
        for key in keys:
            while self._ask("get", key, "") is None:
                if time.monotonic() > deadline:
                    raise dist.DistStoreError(f"no rank has written {key} within {seconds:.0f} s")
                time.sleep(ASK_AGAIN_SECONDS)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key, "") is not None

    def num_keys(self) -> int:
        return int(self._ask("count", "", "") or 0)
