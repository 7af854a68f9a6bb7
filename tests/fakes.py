"""A clock that tests move by hand, and an executor that records what its pages hold.

`LedgerExecutor` has no tensors. Each slot of a page records the token prefix that its keys and values were
computed from, and the turn that computed them. Copies move these records, late and in random order. Every
slice checks that the pages it attends to hold exactly the prefix of its own turn. So a page reclaimed too
early, a page used twice, a missing recompute or a wrong copy fails here within milliseconds.

Pages of streamed turns are staged and stored at random times within the allowed range.

KV can also be wrong. A test spoils a slot with `spoil`. Copies of the slot are wrong, too, and a turn that
attends to the slot fails. After that failure is reported, the KV of the failed turn must not be used.

A sampled token depends only on its prefix. So `reply_to` can compute what a conversation should have replied.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pensieve.core.iteration import (
    Iteration,
    Outcome,
    PageGroup,
    SampledToken,
    Slice,
    SwapIn,
    SwapOut,
    TurnFailure,
)

VOCAB = 997
MASK = (1 << 61) - 1
Slot = tuple[int, int]  # (prefix, turn that computed it)


def extend_prefix(prefix: int, token_id: int) -> int:
    return (prefix * 1_000_003 + token_id + 12_345) & MASK


def prefixes_of(tokens: Sequence[int]) -> list[int]:
    """Return the prefixes that end before position 0, 1, ..."""
    prefixes = [1]
    for token_id in tokens:
        prefixes.append(extend_prefix(prefixes[-1], token_id))
    return prefixes


def next_token(prefix: int) -> int:
    return (prefix >> 7) % VOCAB


def ends_turn(token_id: int) -> bool:
    return token_id % 16 == 0


def reply_to(tokens: Sequence[int], length_max: int, stops: bool = True) -> list[int]:
    """Return the reply of a turn whose log and prompt are `tokens`."""
    prefix = 1
    for token_id in tokens:
        prefix = extend_prefix(prefix, token_id)
    reply: list[int] = []
    while True:
        token_id = next_token(prefix)
        reply.append(token_id)
        if (stops and ends_turn(token_id)) or len(tokens) + len(reply) >= length_max:
            return reply
        prefix = extend_prefix(prefix, token_id)


@dataclass
class _Launched:
    iteration: Iteration
    samples: list[SampledToken]
    failures: list[TurnFailure]


class LedgerExecutor:
    def __init__(
        self,
        device_pages: int,
        host_pages: int,
        chunk_tokens: int,
        seed: int = 0,
        late: float = 0.5,  # probability that an outstanding copy is still not finished
        failing: float = 0.0,  # probability that a sampled row is NaN
        stops: bool = True,  # False: replies end only by their length
        depth: int = 1,
        staging_pages: int = 0,
    ) -> None:
        self.depth = depth
        self.chunk_tokens = chunk_tokens
        self.device: list[list[Slot | None]] = [[None] * chunk_tokens for _ in range(device_pages)]
        self.host: list[list[Slot | None]] = [[None] * chunk_tokens for _ in range(host_pages)]
        self.staging_pages = staging_pages
        self.num_streamed = 0  # number of streamed slices
        self.late = late
        self.failing = failing
        self.stops = stops
        self.failing_turns: set[int] = set()  # a test makes their next sampled rows NaN
        self.num_attended = 0
        self._random = random.Random(seed)
        self._outstanding: dict[int, SwapIn | SwapOut] = {}
        self._landed: list[int] = []
        self._logs: dict[int, list[int]] = {}  # turn -> its context and sampled tokens
        self._prefixes: dict[int, list[int]] = {}  # turn -> prefixes of its first 0, 1, ... tokens
        self._sick_turns: set[int] = set()  # turns with NaN rows, perhaps not reported yet
        self._failed_turns: set[int] = set()  # turns whose failure was reported
        self._num_spoiled = 0
        self._spoiled_by: dict[int, set[int]] = {}  # turn -> wrong slots that it attended to
        self._launched: deque[_Launched] = deque()

    # -- the executor's interface --

    def launch(self, iteration: Iteration) -> None:
        assert len(self._launched) < max(self.depth, 2), (
            "more is launched than the scheduler can plan ahead"
        )
        swapping_in = any(isinstance(copy, SwapIn) for copy in self._outstanding.values())
        assert not (iteration.swap_ins and iteration.swap_outs), "both directions in one iteration"
        assert not (iteration.swap_outs and swapping_in), "a swap-out starts during a swap-in"
        written = {copy.target_page for copy in iteration.copies}
        assert not any(out.device_page in written for out in iteration.swap_outs), (
            "a swap-out sees the writes of earlier iterations only"
        )
        for copy in (
            iteration.copies
        ):  # a device makes them in any order, so none may read another's target
            assert copy.source_page not in written, "a page copy reads what another copy writes"
            self._check_idle_page(copy.target_page, "device")
            self._land_into(copy.source_page)
            source = self.device[copy.source_page][: copy.num_slots]
            assert None not in source, "a page copy reads slots that were never written"
            self.device[copy.target_page] = source + [None] * (self.chunk_tokens - copy.num_slots)
        for swap_in in iteration.swap_ins:
            self._check_idle_page(swap_in.device_page, "device")
            assert None not in self.host[swap_in.host_page][: swap_in.num_slots]
            self.device[swap_in.device_page] = [None] * self.chunk_tokens
            self._outstanding[swap_in.copy_id] = swap_in
        for swap_out in iteration.swap_outs:
            self._check_idle_page(swap_out.host_page, "host")
            assert None not in self.device[swap_out.device_page][: swap_out.num_slots]
            self._outstanding[swap_out.copy_id] = swap_out
        self._land_some()
        samples: list[SampledToken] = []
        failures: list[TurnFailure] = []
        for start in iteration.started:
            self._logs[start.attempt_id] = list(start.context)
            self._prefixes[start.attempt_id] = prefixes_of(start.context)
        staging = _Staging(self, iteration) if iteration.groups else None
        # Compute the slices in order, as an executor may.
        for index, piece in enumerate(iteration.slices):
            attempt_id = piece.attempt_id
            pages = self.device if staging is None else staging.pages_of(index)
            self._write(piece, pages)
            self._attend(piece, pages)
            if not piece.needs_token:
                continue
            sick = attempt_id in self._sick_turns or attempt_id in self.failing_turns
            if sick or self._random.random() < self.failing:
                self._sick_turns.add(attempt_id)
                self._sample(attempt_id, piece.stop, 0)
                failures.append(TurnFailure(attempt_id, "NAN_LOGITS", "a row was NaN"))
                continue
            token_id = next_token(self._prefixes[attempt_id][piece.stop])
            self._sample(attempt_id, piece.stop, token_id)
            stopped = self.stops and ends_turn(token_id)
            samples.append(SampledToken(attempt_id, token_id, f" {token_id}", stopped))
        if staging is not None:
            staging.store_all()
        for attempt_id in iteration.ended:
            self._logs.pop(attempt_id, None)
            self._prefixes.pop(attempt_id, None)
        self._launched.append(_Launched(iteration, samples, failures))

    def collect(self) -> Outcome:
        launched = self._launched.popleft()
        for failure in launched.failures:
            self._failed_turns.add(failure.attempt_id)
            self._failed_turns |= self._spoiled_by.pop(failure.attempt_id, set())
        self._land_some()
        if not launched.iteration.slices and not self._landed and self._outstanding:
            self._land(self._random.choice(list(self._outstanding)))
        finished, self._landed = tuple(self._landed), []
        return Outcome(tuple(launched.samples), finished, tuple(launched.failures))

    # -- called by tests --

    @property
    def known_turns(self) -> list[int]:
        """Return the turns that have started and were not ended."""
        return list(self._logs)

    @property
    def outstanding(self) -> list[int]:
        """Return the ids of unfinished copies."""
        return list(self._outstanding)

    def land(self, *copy_ids: int) -> None:
        """Finish these copies, or all copies if none is named. The next outcome reports them."""
        for copy_id in copy_ids or self.outstanding:
            self._land(copy_id)

    def spoil(self, pages: list[list[Slot | None]], page: int, offset: int) -> None:
        """Make the KV of a slot wrong, as if an unknown failing turn had written it."""
        if (slot := pages[page][offset]) is not None:
            self._num_spoiled += 1
            writer = -self._num_spoiled
            pages[page][offset] = (slot[0], writer)
            self._sick_turns.add(writer)

    # -- the ledger --

    def _sample(self, attempt_id: int, position: int, token_id: int) -> None:
        log = self._logs[attempt_id]
        assert len(log) == position, f"turn {attempt_id} samples position {position} of {len(log)}"
        log.append(token_id)
        prefixes = self._prefixes[attempt_id]
        prefixes.append(extend_prefix(prefixes[-1], token_id))

    def _write(self, piece: Slice, pages: list[list[Slot | None]]) -> None:
        attempt_id, start, stop = piece.attempt_id, piece.start, piece.stop
        known = self._logs[attempt_id][start : start + len(piece.token_ids)]
        assert piece.token_ids.tolist() == known, f"turn {attempt_id} is given other token ids"
        prefixes = self._prefixes[attempt_id]
        for position in range(start, stop):
            page = piece.page_table[position // self.chunk_tokens]
            for copy in self._outstanding.values() if pages is self.device else ():
                if isinstance(copy, SwapIn) and copy.device_page == page:
                    assert position % self.chunk_tokens >= copy.num_slots, "written under a swap-in"
            slot = (prefixes[position + 1], attempt_id)
            pages[page][position % self.chunk_tokens] = slot

    def _attend(self, piece: Slice, pages: list[list[Slot | None]]) -> None:
        attempt_id, stop = piece.attempt_id, piece.stop
        prefixes = self._prefixes[attempt_id]
        for index, page in enumerate(piece.page_table):
            if pages is self.device:
                self._land_into(page)
            for offset, slot in enumerate(pages[page]):
                position = index * self.chunk_tokens + offset
                if position >= stop:
                    break
                assert slot is not None, f"turn {attempt_id}: position {position} has no KV"
                assert slot[0] == prefixes[position + 1], (
                    f"turn {attempt_id}: position {position} holds the KV of another prefix"
                )
                assert slot[1] not in self._failed_turns or slot[1] == attempt_id, (
                    "KV of a failed turn is in use"
                )
                if slot[1] in self._sick_turns:
                    self._sick_turns.add(attempt_id)  # NaN spreads to each turn that attends to it
                    if slot[1] < 0:
                        self._spoiled_by.setdefault(attempt_id, set()).add(slot[1])
                self.num_attended += 1

    def _check_idle_page(self, page: int, tier: str) -> None:
        """Check that no outstanding copy reads or writes this page, which is being overwritten."""
        for copy in self._outstanding.values():
            busy = copy.device_page if tier == "device" else copy.host_page
            assert busy != page, f"{tier} page {page} is overwritten during {copy}"

    def _land_some(self) -> None:
        for copy_id in list(self._outstanding):
            if self._random.random() >= self.late:
                self._land(copy_id)

    def _land_into(self, device_page: int) -> None:
        """Wait for the swap-in of a page, as a layer waits for its event."""
        for copy_id, copy in list(self._outstanding.items()):
            if isinstance(copy, SwapIn) and copy.device_page == device_page:
                self._land(copy_id)

    def _land(self, copy_id: int) -> None:
        copy = self._outstanding.pop(copy_id)
        device, host, count = (
            self.device[copy.device_page],
            self.host[copy.host_page],
            copy.num_slots,
        )
        if isinstance(copy, SwapIn):
            device[:count] = host[:count]
        else:
            self.host[copy.host_page] = device[:count] + [None] * (self.chunk_tokens - count)
        self._landed.append(copy_id)


class _Staging:
    """The groups of an iteration, and which of them are in the two arenas.

    A group can be loaded when the group two before it is done. It is loaded before the previous group
    computes, or just before it computes itself. Its new slots are stored when it is done, or when its arena
    is needed again.
    """

    def __init__(self, ledger: LedgerExecutor, iteration: Iteration) -> None:
        self._ledger, self._groups = ledger, iteration.groups
        self._choose = ledger._random.random
        self._arenas: list[list[list[Slot | None]]] = [[], []]
        self._loaded = 0  # number of loaded groups
        self._unstored: dict[int, PageGroup] = {}
        self._present = -1  # index of the group that computes
        stops = [0, *(group.stop_slice for group in self._groups)]
        first = self._groups[0].first_slice
        assert [group.first_slice for group in self._groups] == [first, *stops[1:-1]]
        assert stops[-1] == len(iteration.slices), (
            "a slice after the last group belongs to no group"
        )
        stored: dict[int, int] = {}
        for number, group in enumerate(self._groups):
            pages = group.host_pages.tolist()
            assert pages
            assert len(set(pages)) == len(pages) <= ledger.staging_pages
            assert len(group.loaded_slots) == len(group.stored_slots) == len(pages)
            for page, count in zip(pages, group.stored_slots, strict=True):
                if count:
                    assert page not in stored, f"host page {page} is written by two groups"
                    stored[page] = number
        for number, group in enumerate(self._groups):
            for page in group.host_pages:
                assert stored.get(page, number) == number, f"host page {page} is read and written"
        for piece in iteration.slices[first:]:
            table = piece.page_table.tolist()
            assert table == sorted(set(table)), "a page table of a group is not ascending"
        for copy in ledger._outstanding.values():
            for group in self._groups:
                for page, loaded, kept in zip(*group[2:], strict=True):
                    if copy.host_page == page:
                        assert isinstance(copy, SwapIn), "streamed during a swap-out to it"
                        assert not kept or copy.num_slots <= loaded, "written under a swap-in"

    def pages_of(self, index: int) -> list[list[Slot | None]]:
        """Return the arena in which slice `index` computes."""
        if index < self._groups[0].first_slice:
            return self._ledger.device
        self._ledger.num_streamed += 1
        while self._present < 0 or index >= self._groups[self._present].stop_slice:
            if self._present >= 0:
                self._unstored[self._present] = self._groups[self._present]
                if self._choose() < 0.5:
                    self._store(self._present)
            self._present += 1
            ahead = self._choose() < 0.5
            while self._loaded <= min(self._present + ahead, len(self._groups) - 1):
                self._load(self._loaded)
        return self._arenas[self._present % 2]

    def store_all(self) -> None:
        self._unstored[self._present] = self._groups[self._present]
        for number in list(self._unstored):
            self._store(number)

    def _load(self, number: int) -> None:
        if number - 2 in self._unstored:
            self._store(number - 2)
        group, size = self._groups[number], self._ledger.chunk_tokens
        arena: list[list[Slot | None]] = []
        for page, count in zip(group.host_pages, group.loaded_slots, strict=True):
            slots = self._ledger.host[page][:count]
            assert None not in slots, (
                f"group {number} loads slots of {page} that were never written"
            )
            arena.append([*slots, *[None] * (size - count)])
        self._arenas[number % 2] = arena
        self._loaded += 1

    def _store(self, number: int) -> None:
        group, host = self._unstored.pop(number), self._ledger.host
        for index, count in enumerate(group.stored_slots):
            if count:
                slots = self._arenas[number % 2][index][:count]
                assert None not in slots, "slots are stored that were never written"
                host[group.host_pages[index]][:count] = slots
