"""Choose an address for each request of a client with one or several addresses. This module does no I/O.

**Home.** Each conversation and job has a home: the address where its requests go first. It is the address
with the highest `score` for the id (rendezvous hashing), unless a daemon has named another address of the
list. If the home fails, the address with the next lower score is used. All clients with the same list choose
the same addresses, in any language. If an address is removed, only its own conversations and jobs move. A new
address takes an equal share from all others. Requests without an id go to the first address of the list that
works, and stay there.

**Failures.** A failed address is avoided for a pause. The pause doubles with each failure in a row; `Retry`
sets its jitter and limit. After the pause, one request checks the daemon's health. The address counts as
failed until such a check succeeds. So at most one request waits for a host that does not respond. Meanwhile,
the other requests use the address with the next lower score. After a broken stream or a timeout, the address
may still work. It is *in doubt*, and is checked before its next use.

    works --failed--> avoided --pause over, one request checks--> works, or avoided for longer
    works --doubt---> in doubt --next request checks------------> works, or avoided

**One request.** A `Route` tries each address once, without pauses, in order. If all fail, the request waits
as with one address (`Retry`) and starts a new round. A turn stays at the address where its stream began. If
its home has recovered, the next turn uses the home again. All addresses get the same request_id, so daemons
that share a history store the message once.

**Why not gRPC's `ring_hash`** (requestHashHeader). Python's gRPC 1.85 reads the header only if
GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY was set before the process first imported grpc. A library
cannot ensure this, and without the variable each call fails ("hash attribute not present"). Besides,
`ring_hash` cannot learn a home, keep a turn at its address, send CancelTurn there, or use a health service.

Thread-safe. A lock guards the state; finalizers never take this lock. At most HOMES_MAX learned homes are
kept (LRU).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pensieve.client.requests import new_id
from pensieve.client.retry import Retry
from pensieve.client.values import shown
from pensieve.errors import (
    DeadlineExceeded,
    Loading,
    NotFound,
    OwnedElsewhere,
    PensieveError,
    Unavailable,
)

HOMES_MAX = 10_000
# Limit of `id_with_same_home`, which needs N draws on average with N addresses.
IDS_DRAWN_MAX = 1_000


@dataclass(frozen=True, repr=False)
class AddressState:
    """What a client knows about one of its addresses. From `client.addresses`.

    Args:
        address: the address as it was given to the client.
        state: "not used yet", "works", "in doubt" (its health is checked before its next use) or "avoided".
        num_failures: failures in a row; 0 if the address works.
        seconds_left: seconds until an avoided address is checked again.
        error: why the address is in doubt or avoided.
    """

    address: str
    state: str
    num_failures: int = 0
    seconds_left: float = 0.0
    error: str = ""

    __repr__ = shown


@dataclass
class _Standing:
    """The failures of one address."""

    num_failures: int = 0  # in a row
    avoided_until: float = 0.0
    is_doubtful: bool = False
    has_answered: bool = False
    error: str = ""  # the latest error


class Choice(NamedTuple):
    """An address for a request. `check_health_first`: use it only if its health check succeeds."""

    name: str
    check_health_first: bool


class Addresses:
    """The addresses of one client and their failures."""

    def __init__(
        self, names: Sequence[str], retry: Retry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.names = tuple(names)
        self._retry = retry
        self._clock = clock
        self._standings = {name: _Standing() for name in self.names}
        # By key (id of a conversation or job): a home that was learned and differs from the hash's choice.
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._default = self.names[0]  # address for requests without a key
        self._lock = threading.Lock()

    @property
    def are_several(self) -> bool:
        """Whether there is more than one address."""
        return len(self.names) > 1

    def order(self, key: str) -> list[str]:
        """Return the addresses for a key, best first. `key`: id of the conversation or job; empty if none."""
        if not self.are_several:
            return list(self.names)
        with self._lock:
            names = ranked(key, self.names) if key else list(self.names)
            home = self._homes.get(key, names[0]) if key else self._default
            if key in self._homes:
                self._homes.move_to_end(key)
        names.remove(home)
        return [home, *names]

    def id_with_same_home(self, key: str) -> str:
        """Return a random id with the same home as `key`, for a fork: this home has the history of `key`."""
        home = self.order(key)[0]
        drawn = new_id()
        for _ in range(IDS_DRAWN_MAX):
            if self.order(drawn)[0] == home:
                break
            drawn = new_id()
        return drawn

    def learn(self, key: str, name: str) -> bool:
        """Remember `name` as the home of `key`. Return False if the client has no such address."""
        if name not in self._standings or not key:
            return False
        with self._lock:
            self._homes.pop(key, None)
            if ranked(key, self.names)[0] != name:
                self._homes[key] = name
                if len(self._homes) > HOMES_MAX:
                    self._homes.popitem(last=False)
        return True

    def choose(self, order: Sequence[str], tried: Sequence[str]) -> Choice | None:
        """Return the first usable address of `order` that is not in `tried`. None if all were tried."""
        if not self.are_several:
            return Choice(order[0], False)
        left = [name for name in order if name not in tried]
        with self._lock:
            now = self._clock()
            for name in left:
                standing = self._standings[name]
                if not standing.num_failures:
                    return Choice(name, standing.is_doubtful)
                if now >= standing.avoided_until:
                    self._avoid(standing, now)
                    return Choice(name, True)
        return Choice(left[0], True) if left else None  # all are avoided: use the best of them

    def note_works(self, name: str, *, is_default: bool = False) -> None:
        """Note that an address has answered."""
        with self._lock:
            standing = self._standings[name]
            standing.num_failures, standing.is_doubtful = 0, False
            standing.has_answered = True
            if is_default:
                self._default = name

    def note_failed(self, name: str, error: str) -> None:
        """Note that an address is unreachable or does not serve."""
        with self._lock:
            standing, now = self._standings[name], self._clock()
            standing.error, standing.is_doubtful = error, False
            if not standing.num_failures or now >= standing.avoided_until:
                self._avoid(standing, now)  # during the pause, more failures do not count

    def note_doubt(self, name: str, error: str) -> None:
        """Note that a call was lost. The address is checked before its next use."""
        with self._lock:
            self._standings[name].error, self._standings[name].is_doubtful = error, True

    def forget_home(self, key: str, name: str) -> None:
        """Forget a learned home that is unreachable, so that the hash decides again."""
        with self._lock:
            if self._homes.get(key) == name:
                del self._homes[key]

    def states(self) -> tuple[AddressState, ...]:
        """Return the state of each address, for people."""
        with self._lock:
            now = self._clock()
            return tuple(
                AddressState(
                    name,
                    _state_text(standing),
                    standing.num_failures,
                    max(standing.avoided_until - now, 0.0) if standing.num_failures else 0.0,
                    standing.error if standing.num_failures or standing.is_doubtful else "",
                )
                for name, standing in self._standings.items()
            )

    def _avoid(self, standing: _Standing, now: float) -> None:
        standing.num_failures += 1
        standing.avoided_until = now + self._retry.backoff(standing.num_failures)


class Route:
    """The addresses that one request tries."""

    def __init__(self, addresses: Addresses, key: str, at: str = "") -> None:
        """`at`: the address where a turn of the same conversation is being read; it is tried first."""
        self.key = key
        self._stays = False
        self.at = at  # the address of the last try
        self._addresses = addresses
        self._first = at
        self._has_answered = False  # the address of the last try has answered
        self._tried: dict[str, PensieveError] = {}  # failures of this round, by address
        # Failed addresses whose daemon answered that it does not serve.
        self._reached: list[str] = []
        self._last: PensieveError | None = None  # error of the last try

    @property
    def are_several(self) -> bool:
        """Whether the client has more than one address."""
        return self._addresses.are_several

    def choose(self) -> Choice:
        """Return the address for the next try. Raise the last error if no address is left."""
        if self._stays:
            self._has_answered = False
            return Choice(self.at, False)
        order = self._addresses.order(self.key)
        if self._first:
            order = [self._first, *(name for name in order if name != self._first)]
        choice = self._addresses.choose(order, [*self._tried])
        if choice is None:  # all addresses were tried, at least with a health check
            if not self._reached and self._last is not None:
                raise self._last
            # Wait at a daemon that answers, even if it does not serve yet: for example, it loads its model.
            choice = Choice(
                next((name for name in order if name in self._reached), order[0]), False
            )
        self.at, self._has_answered = choice.name, False
        return choice

    def answered(self, home: str = "") -> None:
        """Note that the daemon has answered. `home`: the address of the conversation's owner, if given."""
        if not self._has_answered:
            self._has_answered = True
            self.begin_round()
            self._first = self.at
            self._addresses.note_works(self.at, is_default=not self.key)
        if home:
            self._addresses.learn(self.key, home)

    def note_serving(self) -> None:
        """Note that the health check of the current address succeeded."""
        self._addresses.note_works(self.at)

    def note_not_serving(self, error: PensieveError, *, is_reached: bool) -> None:
        """Note that the health check failed. `is_reached`: a daemon answered it."""
        self._fail(error)
        if is_reached:
            self._reached.append(self.at)

    def try_next_address(self, error: PensieveError, repeat: bool = True) -> bool:
        """Note why a try failed. Return whether to send the same request to another address at once.

        If `repeat` is False, the result is True only if the failed address has certainly not acted on the
        request.
        """
        if not self.at or error is self._last:  # the client is closed, or no address is left
            return False
        self._last = error
        if isinstance(error, OwnedElsewhere):
            self._addresses.note_works(self.at)
            self._tried[self.at], self._first = error, ""
            if self._addresses.learn(self.key, error.address) and error.address not in self._tried:
                self._first = error.address
            # Go on only if an address was not tried yet. Otherwise, two daemons that name each other would be
            # asked forever.
            return self._has_untried and not self._has_answered
        if isinstance(error, DeadlineExceeded) and not self._has_answered:
            self._addresses.note_doubt(self.at, str(error))
            return False
        if not isinstance(error, Unavailable):
            self.answered()
            return False
        if self._has_answered:
            self._addresses.note_doubt(self.at, str(error))
            return False
        self._fail(error)
        if self._stays:
            return False
        return self._has_untried and (
            repeat or is_temporary_refusal(error) or not error.may_have_arrived
        )

    def stay(self) -> None:
        """Use only this address from now on, because the daemon there may have acted on the request."""
        self._stays = True

    def doubt(self, error: PensieveError) -> None:
        """Note that the turn timed out and the daemon did not confirm its end."""
        if self.at:
            self._addresses.note_doubt(self.at, str(error))

    def begin_round(self) -> None:
        """Allow all addresses again. Call this after a pause."""
        self._tried.clear()
        self._reached.clear()
        self._last = None

    def explained(self, error: PensieveError) -> PensieveError:
        """Return the error for the caller. Its text lists the addresses and why each of them failed."""
        if not self.are_several:
            return error
        if isinstance(error, OwnedElsewhere):
            error = Unavailable(str(error))
        if isinstance(error, NotFound):
            return self._not_found(error)
        if not isinstance(error, Unavailable):
            return error
        loading = [each for each in self._tried.values() if isinstance(each, Loading)]
        kind: type[Unavailable] = Loading if loading else type(error)
        reasons = {name: str(each) for name, each in self._tried.items()}
        reasons.setdefault(self.at, str(error))
        texts = [f"{name}: {reasons.get(name, 'not tried')}" for name in self._addresses.names]
        combined = kind(f"all {len(texts)} addresses failed ({'; '.join(texts)})")
        cause = loading[0] if loading else error
        combined.retry_after_seconds = cause.retry_after_seconds
        return combined

    def _not_found(self, error: NotFound) -> NotFound:
        home = self._addresses.order(self.key)[0] if self.key else self.at
        if home == self.at:
            return error
        return NotFound(
            f"{error} (asked {self.at}, because {home} is unreachable; "
            "this works only if the daemons share one history)"
        )

    @property
    def _has_untried(self) -> bool:
        return self.are_several and any(n not in self._tried for n in self._addresses.names)

    def _fail(self, error: PensieveError) -> None:
        self._addresses.note_failed(self.at, str(error))
        self._addresses.forget_home(self.key, self.at)
        self._tried[self.at], self._first = error, ""


def score(key: str, name: str) -> int:
    """Return the score of an address for a key, an integer below 2 ** 64. The highest score is the home.

    The score is the first 8 bytes, big-endian, of SHA-256(name + "\\n" + key), in UTF-8. Names contain no
    newline, so different pairs hash different bytes.
    """
    digest = hashlib.sha256(f"{name}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """Return the addresses for a key, highest score first. The order of `names` does not matter."""
    return sorted(names, key=lambda name: (score(key, name), name), reverse=True)


def is_temporary_refusal(error: PensieveError) -> bool:
    """Return whether a daemon has temporarily refused a request without acting on it."""
    return isinstance(error, Loading | OwnedElsewhere)


def _state_text(standing: _Standing) -> str:
    if standing.num_failures:
        return "avoided"
    if standing.is_doubtful:
        return "in doubt"
    return "works" if standing.has_answered else "not used yet"
