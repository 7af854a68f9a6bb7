"""What a tenant could learn about others from the cost of its calls: that a text was used, or an id exists.

An attacker who guesses can tell right guesses from wrong ones only if their work or time differs. The measure
is the area under the ROC curve: 0.5 is a random guess, 1 is certainty. The suite compares the work, which
decides the time and is the same on every machine. Nightly runs (`PENSIEVE_TEST_SCALE` above 1) also compare
seconds. For texts, the attacker also guesses within its own tenant. There it must see a difference, which
shows that the measurement works.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from pensieve.client import Client
from pensieve.errors import NotFound
from pensieve.guard import callers
from pensieve.guard.exposure import Listening
from tests.conversations.rig_daemon import ECHO, DaemonRig
from tests.scale import SCALE

AUC_MAX = 0.55
SLOW = {"token_budget": "16"}  # so that the time to first token shows how many tokens were computed
WORDS = ("rain", "Oslo", "fine", "today", "word", "sign", "seven", "green", "house", "river")
Probe = Callable[[Client, str, str], float]  # client, text, prefix id -> cost


def auc(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the probability that one of `some` is below one of `others`, or the reverse if larger."""
    ordered = sorted(others)
    below = sum(
        len(ordered) - (bisect_left(ordered, each) + bisect_right(ordered, each)) / 2
        for each in some
    ) / (len(some) * len(others))
    return max(below, 1 - below)


@contextmanager
def tenants(folder: Path, program: tuple[str, ...]) -> Iterator[tuple[DaemonRig, Client, Client]]:
    """Run a daemon that computes few tokens per iteration, with a client for each of two tenants."""
    given = [callers.new_token(tenant, admin=False) for tenant in ("victim", "guesser")]
    path = folder / "tokens.toml"
    path.write_text("".join(entry for _, entry in given))
    path.chmod(0o600)
    data = folder / "data"
    listening = Listening("127.0.0.1:0", data / "admin.sock", tokens=callers.read_tokens(path))
    with (
        DaemonRig(data, listening=listening, program=program, written=SLOW) as rig,
        Client(rig.server.address, token=given[0][0]) as victim,
        Client(rig.server.address, token=given[1][0]) as guesser,
    ):
        yield rig, victim, guesser


def texts(name: str, count: int) -> dict[str, str]:
    """Return texts by prefix_id, all with the same length and words."""
    choose = random.Random(name)
    return {
        f"{name}{i}": " ".join(["Say", *choose.sample(WORDS * 6, 60), str(100 + i)])
        for i in range(count)
    }


def say(client: Client, name: str, text: str, prefix_id: str) -> float:
    """Create a conversation that begins with a text. Return the seconds until its first token."""
    conversation = client.conversation(name)
    conversation.create(system_prompt=text, prefix_id=prefix_id)
    began = time.perf_counter()
    conversation.ask("hello", max_tokens=1, ignore_eos=True)
    return time.perf_counter() - began


def num_computed(rig: DaemonRig) -> float:
    """Return the number of positions that the engine has computed."""
    return float(rig.call(rig.daemon.stats()).figures["tokens_computed"])


class Costs(NamedTuple):
    right: list[float]
    wrong: list[float]

    @property
    def auc(self) -> float:
        return auc(self.right, self.wrong)


def guess(
    client: Client, used: Mapping[str, str], unused: Mapping[str, str], probe: Probe
) -> Costs:
    """Probe all guesses in random order. Return the costs of right and wrong guesses."""
    costs = Costs([], [])
    guesses = [*used.items(), *unused.items()]
    random.Random(len(guesses)).shuffle(guesses)
    for prefix_id, text in guesses:
        cost = probe(client, text, prefix_id)
        (costs.right if prefix_id in used else costs.wrong).append(cost)
    return costs


def test_auc_is_one_half_for_equal_costs_and_one_for_separated_costs() -> None:
    assert auc([1, 2, 3], [4, 5, 6]) == auc([4, 5, 6], [1, 2, 3]) == 1.0
    assert auc([1, 1, 1], [1, 1]) == 0.5
    assert auc([1, 3], [2, 2]) == 0.5


def test_a_right_guess_of_another_tenants_text_costs_the_same_work(tmp_path: Path) -> None:
    with tenants(tmp_path, ECHO) as (rig, victim, guesser):
        used, unused = texts("p", 24), texts("q", 24)
        for prefix_id, text in used.items():
            say(victim, f"v-{prefix_id}", text, prefix_id)

        def work(client: Client, text: str, prefix_id: str) -> float:
            before = num_computed(rig)
            say(client, prefix_id, text, prefix_id)
            return num_computed(rig) - before

        assert guess(guesser, used, unused, work).auc <= AUC_MAX
        assert guess(victim, used, unused, work).auc > 0.95, "its own prefixes are reused"


@pytest.mark.skipif(SCALE == 1, reason="seconds are compared only in nightly runs")
@pytest.mark.timeout(3600)
def test_a_right_guess_of_another_tenants_text_takes_the_same_time(tmp_path: Path) -> None:
    found, own = Costs([], []), Costs([], [])

    def seconds(client: Client, text: str, prefix_id: str) -> float:
        return say(client, prefix_id, text, prefix_id)

    with tenants(tmp_path, (*ECHO, "--seconds=0.005")) as (_, victim, guesser):
        for number in range(24):  # a daemon keeps the latest 256 prefixes of all tenants
            used, unused = texts(f"p{number}-", 50), texts(f"q{number}-", 50)
            for prefix_id, text in used.items():
                say(victim, f"v-{prefix_id}", text, prefix_id)
            for costs, client in ((found, guesser), (own, victim)):
                more = guess(client, used, unused, seconds)
                costs.right.extend(more.right)
                costs.wrong.extend(more.wrong)
    print(f"AUC by seconds: {found.auc:.3f} between tenants, {own.auc:.3f} within one")
    assert found.auc <= AUC_MAX
    assert own.auc > 0.7


@pytest.mark.skipif(SCALE == 1, reason="seconds are compared only in nightly runs")
@pytest.mark.timeout(3600)
def test_a_lookup_of_another_tenants_id_takes_the_same_time_as_an_unknown_id(
    tmp_path: Path,
) -> None:
    count = 2000
    with tenants(tmp_path, ECHO) as (_, victim, guesser):
        for number in range(200):
            victim.conversation(f"v{number}").create()
        costs = Costs([], [])
        for number in range(2 * count):
            exists = number % 2 == 0
            name = f"{'v' if exists else 'w'}{number // 2 % 200}"
            began = time.perf_counter()
            with pytest.raises(NotFound):
                guesser.conversation(name).get()
            (costs.right if exists else costs.wrong).append(time.perf_counter() - began)
    print(f"AUC by seconds: {costs.auc:.3f} for an id")
    assert costs.auc <= AUC_MAX
