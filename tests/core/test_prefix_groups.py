"""Choose one shared prefix for each request. Compare with all choices (small trees) and known results."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest

from pensieve.core.prefix_groups import (
    PrefixGroup,
    prefix_groups,
    saving,
    saving_of_tree,
)

Requests = Sequence["array[int]"]


def saving_of_lru(requests: Sequence[array[int]], tokens_max: int, block_tokens: int) -> float:
    """Return the share of tokens that an LRU block cache saves for the requests in this order."""
    total, saved = sum(map(len, requests)), 0
    blocks = OrderedDict[tuple[int, bytes], int]()  # key: the previous block, and the tokens
    num_blocks_max, next_id = tokens_max // block_tokens, 0
    for request in requests:
        before, hits = 0, True
        used = []
        for start in range(0, len(request) - block_tokens + 1, block_tokens):
            key = (before, request[start : start + block_tokens].tobytes())
            found = blocks.get(key)
            if found is None:
                hits = False
                next_id += 1
                found = blocks[key] = next_id
            elif hits:
                saved += block_tokens
            before = found
            used.append(key)
        for key in reversed(used):  # the first block of the prompt is evicted last
            blocks.move_to_end(key)
        while len(blocks) > num_blocks_max:
            blocks.popitem(last=False)
    return saved / total if total else 0.0


def requests_of(*texts: str) -> list[array[int]]:
    return [array("I", map(ord, text)) for text in texts]


def num_computed(groups: Sequence[PrefixGroup], requests: Requests) -> int:
    return sum(group.num_computed(requests) for group in groups)


def check(groups: Sequence[PrefixGroup], requests: Requests) -> None:
    members = sorted(each for group in groups for each in group.members)
    assert members == list(range(len(requests)))
    for group in groups:
        first = requests[group.members[0]][: group.prefix_tokens]
        assert len(first) == group.prefix_tokens
        assert all(requests[each][: group.prefix_tokens] == first for each in group.members)
        assert group.prefix_tokens == 0 or len(group.members) > 1
        assert group.prefix_tokens or len(group.members) == 1
    computed = [group.num_computed(requests) for group in groups]
    assert computed == sorted(computed)


def fewest_tokens(requests: Requests) -> int:
    """Return the best result, from trying every set of prefixes that two or more requests share."""
    texts = [tuple(request) for request in requests]
    prefixes = {
        text[:length]
        for text in texts
        for length in range(1, len(text) + 1)
        if sum(other[:length] == text[:length] for other in texts) > 1
    }
    inner = [
        prefix
        for prefix in prefixes
        if len({text[: len(prefix) + 1] for text in texts if text[: len(prefix)] == prefix}) > 1
        or prefix in texts
    ]
    best = sum(map(len, texts))
    for count in range(1, len(inner) + 1):
        for chosen in itertools.combinations(inner, count):
            total = sum(map(len, chosen))
            for text in texts:
                own = [len(each) for each in chosen if text[: len(each)] == each]
                total += len(text) - max(own, default=0)
            best = min(best, total)
    return best


def num_computed_by_algorithm_1(requests: Requests) -> int:
    """Return the number of computed tokens if the paper's Algorithm 1 enlarges first-level prefixes."""

    def node(members: list[int], start: int) -> Any:
        """Return (tokens of the node's run, leaves, requests that end here, children)."""
        end = start
        while all(len(requests[each]) > end for each in members) and (
            len({requests[each][end] for each in members}) == 1
        ):
            end += 1
        ending = [each for each in members if len(requests[each]) == end]
        return (
            end - start,
            len(members),
            ending,
            children([each for each in members if len(requests[each]) > end], end),
        )

    def children(members: list[int], start: int) -> list[Any]:
        by_token: dict[int, list[int]] = {}
        for each in members:
            by_token.setdefault(requests[each][start], []).append(each)
        return [node(group, start) for group in by_token.values()]

    def enlarged(found: list[Any]) -> list[Any]:
        out: list[Any] = []
        for tokens, leaves, ending, below in found:
            below = enlarged(below)
            kept = []
            for child in below:
                if (child[1] - 1) * child[0] > tokens:
                    out.append((tokens + child[0], child[1], child[2], child[3]))
                    leaves -= child[1]
                else:
                    kept.append(child)
            if leaves:
                out.append((tokens, leaves, ending, kept))
        return out

    def alone(found: list[Any]) -> int:
        return sum(each[0] * each[1] + alone(each[3]) for each in found)

    first = enlarged(children(list(range(len(requests))), 0))
    return sum(each[0] + alone(each[3]) for each in first)


def random_prompts(seed: int) -> list[array[int]]:
    """Return up to nine prompts over two words, made of runs of one to six tokens."""
    choose = random.Random(seed)
    runs = [[choose.randrange(2)] * choose.randint(1, 6) for _ in range(4)]
    prompts = []
    for _ in range(choose.randint(1, 9)):
        prompt: list[int] = []
        for _ in range(choose.randint(1, 4)):
            prompt += choose.choice(runs)
        prompts.append(array("I", prompt))
    return prompts


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_no_choice_of_prefixes_computes_fewer_tokens(first: int) -> None:
    better = 0
    for seed in range(first, first + 100):
        requests = random_prompts(seed)
        groups = prefix_groups(requests)
        check(groups, requests)
        found = num_computed(groups, requests)
        assert found == fewest_tokens(requests), f"seed {seed}: {requests}"
        paper = num_computed_by_algorithm_1(requests)
        assert found <= paper, f"seed {seed}"
        better += found < paper
        assert saving(groups, requests) <= saving_of_tree(requests) + 1e-12
    assert better > 5


def test_instructions_are_computed_again_for_a_document_that_many_share() -> None:
    requests = requests_of(
        *("IN" + document * 9 + str(n) for document in "AB" for n in range(3)), "INx"
    )
    groups = prefix_groups(requests)
    check(groups, requests)
    assert [(group.prefix_tokens, len(group.members)) for group in groups] == [
        (0, 1),
        (11, 3),
        (11, 3),
    ]


def test_a_document_of_one_request_is_not_a_shared_prefix() -> None:
    requests = requests_of("INSTRUCTIONS a", "INSTRUCTIONS b", "INSTRUCTIONS c")
    assert prefix_groups(requests) == [PrefixGroup(13, (0, 1, 2))]
    assert saving(prefix_groups(requests), requests) == saving_of_tree(requests) == 26 / 42


@pytest.mark.parametrize(
    ("texts", "groups"),
    [
        ((), []),
        (("",), [PrefixGroup(0, (0,))]),
        (("", "", "a"), [PrefixGroup(0, (0,)), PrefixGroup(0, (1,)), PrefixGroup(0, (2,))]),
        (("abc", "abc", "abc"), [PrefixGroup(3, (0, 1, 2))]),
        (("ab", "abc", "x"), [PrefixGroup(0, (2,)), PrefixGroup(2, (0, 1))]),
        (("a", "b"), [PrefixGroup(0, (0,)), PrefixGroup(0, (1,))]),
    ],
)
def test_prefix_groups_of_edge_cases(texts: Sequence[str], groups: list[PrefixGroup]) -> None:
    found = prefix_groups(requests_of(*texts))
    assert found == groups
    assert saving(found, requests_of(*texts)) >= 0.0


def test_tokens_are_compared_as_numbers() -> None:
    """As bytes, 256 and 1 would be in another order."""
    requests = [array("I", each) for each in ([256, 1], [256, 2], [1, 256], [1, 255])]
    groups = prefix_groups(requests)
    assert sorted(group.members for group in groups) == [(0, 1), (2, 3)]


def test_prompts_that_are_prefixes_of_each_other_need_no_recursion() -> None:
    whole = array("I", range(5000))
    requests = [whole[:length] for length in range(1, 5001)]
    groups = prefix_groups(requests)
    check(groups, requests)
    assert num_computed(groups, requests) < 0.1 * sum(map(len, requests))


def paper_workload(num: int, seed: int) -> list[array[int]]:
    """Return prompts in groups of seven with 1,100 shared tokens, 100 shared by all, and 400 of their own."""
    choose = random.Random(seed)

    def words(count: int) -> array[int]:
        return array("I", choose.choices(range(32_000), k=count))

    common = words(100)
    requests: list[array[int]] = []
    while len(requests) < num:
        prefix = common + words(1000)
        requests += (prefix + words(choose.randint(300, 500)) for _ in range(7))
    choose.shuffle(requests)
    return requests[:num]


@pytest.mark.parametrize("seed", range(3))
def test_the_papers_workload_saves_as_many_tokens_as_the_paper_reports(seed: int) -> None:
    """The groups save 54.9 % of the tokens. An LRU cache would save 44.2 %."""
    requests = paper_workload(3000, seed)
    groups = prefix_groups(requests)
    check(groups, requests)
    assert saving(groups, requests) >= 0.54
    assert saving_of_tree(requests) - saving(groups, requests) <= 0.07
    assert saving_of_lru(requests, 100 * 1500, 16) < 0.3  # the requests come in random order
    assert saving_of_lru(requests, 10**9, 16) == pytest.approx(saving_of_tree(requests), abs=0.02)
