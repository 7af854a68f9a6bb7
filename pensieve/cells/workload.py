"""Random requests like those of BatchMaker: lengths of sentences, and parse trees.

The paper's data sets are not part of this project. These distributions have the quantiles that the paper
prints.
"""

from __future__ import annotations

import random

from pensieve.cells.graph import Tree

MEDIAN_LOG, SIGMA = 2.933, 0.7  # of log-normal lengths: mean 24, and 99 % below 100
LENGTH_MAX = 330
NUM_WORDS = 1000


def sentence_length(rng: random.Random, longest: int = LENGTH_MAX) -> int:
    return min(longest, max(1, round(rng.lognormvariate(MEDIAN_LOG, SIGMA))))


def translated_length(rng: random.Random, source: int) -> int:
    return max(1, round(source * rng.uniform(0.8, 1.2)))


def parse_tree(rng: random.Random) -> Tree:
    """Return a tree with 19 leaves on average."""
    return random_tree(rng, max(2, round(rng.gauss(19, 9))))


def random_tree(rng: random.Random, leaves: int) -> Tree:
    if leaves == 1:
        return rng.randrange(NUM_WORDS)
    left = rng.randrange(1, leaves)
    return random_tree(rng, left), random_tree(rng, leaves - left)


def complete_tree(depth: int) -> Tree:
    return (complete_tree(depth - 1), complete_tree(depth - 1)) if depth else 0
