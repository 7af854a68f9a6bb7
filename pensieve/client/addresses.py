"""The addresses of a client: which are out of reach, where each conversation is at home; no socket in here.

**Where a request goes.**  A request about a conversation (or a job) goes to the address that its id has the
highest `score` with (rendezvous hashing), unless a daemon has named another one of these addresses as its
home.  The further scores say which address is next.  So all clients that name the addresses alike agree, in
any language; when an address leaves, only its own keys move, and when one is added, it takes its share from
all others alike.  Other requests go to the first address of the list that works, and stay there.

**An address that fails** is avoided for a pause that doubles with each failure in a row, with jitter and a
bound (those of `Retry`).  After it, one request looks whether the daemon serves (its health), and the address
counts as failed until that is known; so no more than one request waits for a host that swallows packets.
Meanwhile the next address in each conversation's own order stands in.  A stream that broke, or a timeout
that passed without an answer, proves nothing: the address is in *doubt*, and is looked at before it is used.

    works --failed--> avoided --pause is over, one looks--> works, or avoided for longer
    works --doubt--> looked at by whoever comes --> works, or avoided

**A request's way** is a `Route`.  It goes to each address once, at once, in its order; when all have failed,
the request waits as with one address (`Retry`) and begins a new round.  A turn stays where its stream has
begun, so a home that is back is used from the next turn on.  The same request, with its request_id, goes
everywhere, so daemons with one history hold the message once.

**Why not gRPC's own `ring_hash`** (requestHashHeader).  Python's gRPC 1.85 takes the header only if the
variable GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY was set before the first import of grpc in the
process, which a library cannot promise; without it each call fails ("hash attribute not present").  Nor can
it learn a home, hold a turn at its address, send CancelTurn after it, or look at a health service.

Any thread may call.  A lock guards the state; nothing that a finalizer runs takes it.  What is learned of
homes is bounded: HOMES_MAX, the one that was used longest ago is forgotten.
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
IDS_DRAWN_MAX = 1_000  # for a new conversation beside another one; N addresses take N on average


@dataclass(frozen=True, repr=False)
class AddressState:
    """What a client knows of one of its addresses; from `client.addresses`.

    Args:
        address: as the client was given it.
        state: "not used yet", "works", "in doubt" (looked at before it is used again) or "avoided".
        num_failures: in a row; 0 if it works.
        seconds_left: until it is looked at again, where it is avoided.
        error: why it is in doubt or avoided.
    """

    address: str
    state: str
    num_failures: int = 0
    seconds_left: float = 0.0
    error: str = ""

    __repr__ = shown


@dataclass
class _Standing:
    """What is known of one address."""

    num_failures: int = 0  # in a row
    avoided_until: float = 0.0
    is_doubtful: bool = False
    has_answered: bool = False
    error: str = ""  # the last one


class Choice(NamedTuple):
    """An address for a request; with `look_first`, if its health service says that it serves."""

    name: str
    look_first: bool


class Addresses:
    """The addresses of one client, and what is known of them."""

    def __init__(
        self, names: Sequence[str], retry: Retry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.names = tuple(names)
        self._retry = retry
        self._clock = clock
        self._standings = {name: _Standing() for name in self.names}
        self._homes: OrderedDict[str, str] = OrderedDict()  # learned; what the hash says is not
        self._for_others = self.names[0]  # where what is about no conversation goes
        self._lock = threading.Lock()

    @property
    def are_several(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.names) > 1

    def order(self, key: str) -> list[str]:
        """The addresses for a key, the first first; an empty key is about no conversation."""
        if not self.are_several:
            return list(self.names)
        with self._lock:
            names = ranked(key, self.names) if key else list(self.names)
            home = self._homes.get(key, names[0]) if key else self._for_others
            if key in self._homes:
                self._homes.move_to_end(key)
        names.remove(home)
        return [home, *names]

    def id_beside(self, key: str) -> str:
        """A random id that is at home where this key is: for a fork, whose history lies there."""
        home = self.order(key)[0]
        drawn = new_id()
        for _ in range(IDS_DRAWN_MAX):
            if self.order(drawn)[0] == home:
                break
            drawn = new_id()
        return drawn

    def learn(self, key: str, name: str) -> bool:
        """A daemon says where a key is at home; False if that is none of these addresses."""
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
        """The first of these that may be used and was not tried yet; None if all were."""
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
        return Choice(left[0], True) if left else None  # rather than none

    def works(self, name: str, *, is_for_others: bool = False) -> None:
        """It has answered."""
        with self._lock:
            standing = self._standings[name]
            standing.num_failures, standing.is_doubtful = 0, False
            standing.has_answered = True
            if is_for_others:
                self._for_others = name

    def failed(self, name: str, error: str) -> None:
        """It cannot be reached, or does not serve; what was learned of its conversations is void."""
        with self._lock:
            standing, now = self._standings[name], self._clock()
            standing.error, standing.is_doubtful = error, False
            if not standing.num_failures or now >= standing.avoided_until:
                self._avoid(standing, now)  # else others have seen this failure already

    def doubt(self, name: str, error: str) -> None:
        """Something of it was lost; whether it works is to be found out before it is used again."""
        with self._lock:
            self._standings[name].error, self._standings[name].is_doubtful = error, True

    def forget_home(self, key: str, name: str) -> None:
        """The address that a daemon has named is out of reach: the hash decides again."""
        with self._lock:
            if self._homes.get(key) == name:
                del self._homes[key]

    def states(self) -> tuple[AddressState, ...]:
        """For people."""
        with self._lock:
            now = self._clock()
            return tuple(
                AddressState(
                    name,
                    _word(standing),
                    standing.num_failures,
                    max(standing.avoided_until - now, 0.0) if standing.num_failures else 0.0,
                    standing.error if standing.num_failures or standing.is_doubtful else "",
                )
                for name, standing in self._standings.items()
            )

    def _avoid(self, standing: _Standing, now: float) -> None:
        standing.num_failures += 1
        standing.avoided_until = now + self._retry.grown(standing.num_failures)


class Route:
    """Where one request goes, try after try."""

    def __init__(
        self, addresses: Addresses, key: str, at: str = "", *, is_of_one: bool = False
    ) -> None:
        """`at`: where a turn of the same conversation is being read, which then comes first.

        `is_of_one`: what it is about lies with one of the daemons alone, as a job does.
        """
        self.key = key
        self._is_of_one = is_of_one
        self._stays = False
        self.at = at  # the address of the last try
        self._addresses = addresses
        self._first = at
        self._has_answered = False  # in this try
        self._tried: dict[str, PensieveError] = {}  # in this round: why each of them failed
        self._reached: list[str] = []  # of these, those with a daemon that does not serve
        self._last: PensieveError | None = None  # what the last try failed with

    @property
    def are_several(self) -> bool:
        """Whether another address could be tried."""
        return self._addresses.are_several

    def choose(self) -> Choice:
        """The address for the next try; raises the error of the last one if there is none left to try."""
        if self._stays:
            self._has_answered = False
            return Choice(self.at, False)
        order = self._addresses.order(self.key)
        if self._first:
            order = [self._first, *(name for name in order if name != self._first)]
        choice = self._addresses.choose(order, [*self._tried])
        if choice is None:  # the rest was only looked at
            if not self._reached and self._last is not None:
                raise self._last
            # The one that is there but does not serve says best what is to be waited for.
            choice = Choice(
                next((name for name in order if name in self._reached), order[0]), False
            )
        self.at, self._has_answered = choice.name, False
        return choice

    def answered(self, home: str = "") -> None:
        """The daemon has answered; `home` is where it says that the conversation is."""
        if not self._has_answered:
            self._has_answered = True
            self.begin_round()
            self._first = self.at
            self._addresses.works(self.at, is_for_others=not self.key)
        if home or (self._is_of_one and self.are_several):
            self._addresses.learn(self.key, home or self.at)

    def serves(self) -> None:
        """What was found when its health was looked at."""
        self._addresses.works(self.at)

    def does_not_serve(self, error: PensieveError, *, is_reached: bool) -> None:
        """Likewise; `is_reached`: a daemon is there."""
        self._fail(error)
        if is_reached:
            self._reached.append(self.at)

    def goes_on(self, error: PensieveError, repeat: bool = True) -> bool:
        """Note why a try failed; whether the same request goes to another address at once.

        Without `repeat` it goes on only if this one has certainly done nothing.
        """
        if not self.at or error is self._last:  # the client is closed, or nothing is left to try
            return False
        self._last = error
        if isinstance(error, OwnedElsewhere):
            self._addresses.works(self.at)
            self._tried[self.at], self._first = error, ""
            if self._addresses.learn(self.key, error.address) and error.address not in self._tried:
                self._first = error.address
            return self._is_one_left and not self._has_answered  # else two could toss it forever
        if isinstance(error, DeadlineExceeded) and not self._has_answered:
            self._addresses.doubt(self.at, str(error))
            return False
        if isinstance(error, NotFound) and self._is_of_one and not self._has_answered:
            self._addresses.works(self.at)
            self._tried[self.at], self._first = error, ""
            return self._is_one_left
        if not isinstance(error, Unavailable):
            self.answered()
            return False
        if self._has_answered:
            self._addresses.doubt(self.at, str(error))
            return False
        self._fail(error)
        if self._stays:
            return False
        return self._is_one_left and (repeat or is_waited_for(error) or not error.may_have_arrived)

    def stay(self) -> None:
        """This address may have done what was requested: no other one is to do it, too."""
        self._stays = True

    def doubt(self, error: PensieveError) -> None:
        """The time was over, and the daemon did not say what had become of the turn."""
        if self.at:
            self._addresses.doubt(self.at, str(error))

    def begin_round(self) -> None:
        """After a pause: all may be tried again."""
        self._tried.clear()
        self._reached.clear()
        self._last = None

    def explained(self, error: PensieveError) -> PensieveError:
        """The error for whoever made the request: which addresses were tried, and why each one failed."""
        if not self.are_several:
            return error
        if isinstance(error, OwnedElsewhere):
            error = Unavailable(str(error))
        if isinstance(error, NotFound):
            away = [each for each in self._tried.values() if isinstance(each, Unavailable)]
            if not (self._is_of_one and away):
                return error if self._is_of_one else self._not_found(error)
            error = away[0]  # which may have it
        if not isinstance(error, Unavailable):
            return error
        worth_waiting = [each for each in self._tried.values() if isinstance(each, Loading)]
        kind: type[Unavailable] = Loading if worth_waiting else type(error)
        whys = {name: str(each) for name, each in self._tried.items()}
        whys.setdefault(self.at, str(error))
        texts = [f"{name}: {whys.get(name, 'not tried')}" for name in self._addresses.names]
        whole = kind(f"no address of {len(texts)} could do it ({'; '.join(texts)})")
        of = worth_waiting[0] if worth_waiting else error
        whole.retry_after_seconds = of.retry_after_seconds
        return whole

    def _not_found(self, error: NotFound) -> NotFound:
        home = self._addresses.order(self.key)[0] if self.key else self.at
        if home == self.at:
            return error
        return NotFound(
            f"{error} (at {self.at}, which stands in for {home}: that helps only where the daemons "
            "have one history)"
        )

    @property
    def _is_one_left(self) -> bool:
        return self.are_several and any(n not in self._tried for n in self._addresses.names)

    def _fail(self, error: PensieveError) -> None:
        self._addresses.failed(self.at, str(error))
        self._addresses.forget_home(self.key, self.at)
        self._tried[self.at], self._first = error, ""


def score(key: str, name: str) -> int:
    """How much an address attracts a key: a whole number below 2 ** 64.

    It is the first 8 bytes, big-endian, of SHA-256(name + "\\n" + key), in UTF-8.  No name holds a newline,
    so two pairs never hash the same bytes.
    """
    digest = hashlib.sha256(f"{name}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """The addresses for a key, its home first; the order in which they are given does not matter."""
    return sorted(names, key=lambda name: (score(key, name), name), reverse=True)


def is_waited_for(error: PensieveError) -> bool:
    """Whether a daemon has refused a request, of which it has done nothing, for a time."""
    return isinstance(error, Loading | OwnedElsewhere)


def _word(standing: _Standing) -> str:
    if standing.num_failures:
        return "avoided"
    if standing.is_doubtful:
        return "in doubt"
    return "works" if standing.has_answered else "not used yet"
