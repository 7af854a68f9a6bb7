"""Replay one seed of the fault search, or search more seeds.

python -m tests.faults 42                    print every event of the run with seed 42, one a line
python -m tests.faults --seeds 1000..5000    search these seeds
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import time
import traceback
from collections import Counter

from tests.faults.disk import shelf
from tests.faults.kinds import KINDS
from tests.faults.world import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="the world to replay, event by event")
    parser.add_argument("--seeds", metavar="A..B", help="search the worlds A to B - 1")
    options = parser.parse_args()
    if (options.seed is None) == (options.seeds is None):
        parser.error("give one seed, or --seeds A..B")
    with shelf() as place:
        if options.seed is not None:
            world = run(options.seed, place, print)
            print(f"\n{world.hash}  {world.num_events} events; {dict(world.happened)}")
            return 0
        first, last = map(int, options.seeds.split(".."))
        failed: list[int] = []
        happened: Counter[str] = Counter()
        began = time.monotonic()
        for seed in range(first, last):
            try:
                happened += run(seed, place).happened
            except Exception as error:
                failed.append(seed)
                where = traceback.extract_tb(error.__traceback__)[-1]
                print(f"\nseed {seed}: {type(error).__name__} {str(error)[:300]} ({where.name})")
            shutil.rmtree(place / f"world-{seed}")
            if seed % 50 == 49:
                gc.collect()
                done = seed - first + 1
                rate = (time.monotonic() - began) / done
                print(f"\r{done} seeds, {len(failed)} failed, {rate * 1000:.0f} ms each", end="")
                sys.stdout.flush()
    print(f"\nfailed: {failed}")
    for kind in KINDS:
        print(f"{happened[kind]:8} {kind}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
