"""Take the protections out, one after the other, and see whether their tests notice.

scripts/check_protections                     # all of them
scripts/check_protections queue synchronous   # those whose names contain one of these words
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from tests.protections import Protection
from tests.protections.table import PROTECTIONS
from tests.protections.taken_out import Copy, Result, Verdict, copy_of_the_tree


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/check_protections", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("words", nargs="*", help="only those whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="name them, and take none out")
    parser.add_argument("--results", type=Path, help="append a line of JSON for each to this file")
    parser.add_argument(
        "--resume", action="store_true", help="leave out those that --results says were noticed"
    )
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests first with all protections in"
    )
    given = parser.parse_args()
    chosen = [
        each
        for each in PROTECTIONS
        if not given.words or any(word in each.name for word in given.words)
    ]
    if given.resume and given.results is not None:
        done = noticed(given.results)
        chosen = [each for each in chosen if each.name not in done]
    if given.list:
        for each in chosen:
            print(each.name, *(f"    {test}" for test in each.tests), sep="\n")
        return 0
    if not chosen:
        parser.error("no protection has such a name, or all are done")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copy is removed on the way
    with copy_of_the_tree() as copy:
        if not given.trust and not passes(copy, chosen):
            return 1
        results = [(each, taken_out(copy, each, given.results)) for each in chosen]
    missed = [each for each, result in results if result.verdict is not Verdict.NOTICED]
    print(f"{len(results) - len(missed)} of {len(results)} absent protections are noticed")
    for each in missed:
        print(f"  not this one: {each.name}")
    return 1 if missed else 0


def noticed(results: Path) -> set[str]:
    """The names of those whose latest line says so."""
    if not results.exists():
        return set()
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    verdicts = {line["protection"]: line["verdict"] for line in lines}
    return {name for name, verdict in verdicts.items() if verdict == Verdict.NOTICED.value}


def passes(copy: Copy, chosen: list[Protection]) -> bool:
    """Whether every test passes as long as nothing is taken out."""
    tests = list(dict.fromkeys(test for each in chosen for test in each.tests))
    print(f"with all protections in: {len(tests)} tests", flush=True)
    run = copy.run(tests)
    if run.mistake is not None:
        print(f"they cannot be run: {run.mistake}")
        return False
    missing = [test for test in tests if test not in run.failures]
    for test in [*run.failed, *missing]:
        print(f"  {test} fails though nothing is taken out: {run.failures.get(test)}")
    return not run.failed and not missing


def taken_out(copy: Copy, protection: Protection, results: Path | None) -> Result:
    began = time.monotonic()
    result = copy.take_out(protection)
    seconds = time.monotonic() - began
    print(f"{result.verdict.value:8} {seconds:6.1f} s  {protection.name}", flush=True)
    print(f"{'':20} {result.why}", flush=True)
    if results is not None:
        line = {
            "protection": protection.name,
            "verdict": result.verdict.value,
            "why": result.why,
            "seconds": round(seconds, 1),
        }
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
