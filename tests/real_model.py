"""Conversations with a real model and tiny caches, compared with plain transformers (fp32, greedy).

    python -m tests.real_model                          # smollm2, which is fetched if necessary; 96 turns
    python -m tests.real_model Qwen/Qwen3-0.6B --turns 8 --results exact.json

Eight clients use a `pensieve serve` at once. Its caches are too small for them. So earlier turns are partly
on the device, partly on the host, and partly recomputed. Afterwards plain transformers reads each
conversation once. A token of a reply is wrong if another token would have been more likely.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from pensieve.client import Client
from pensieve.launch.model_folder import resolve_model
from tests.conversations.rig import Reference
from tests.conversations.rig_daemon import ServeProcess

PEOPLE = 8
REPLY_TOKENS_MAX = 64
SETTINGS = (
    *("--dtype", "float32", "--device-cache", "2400t", "--host-cache", "3200t"),
    *("--token-budget", "256", "--turns-max", "4"),
)
SAYINGS = (
    "Hello! My name is {name} and I live in Oslo.",
    "What is the capital of France?",
    "Tell me a short story about a fox.",
    "Why is the sky blue?",
    "List five animals and one thing about each.",
    "What is my name, and where do I live?",
    "Write two sentences about the sea.",
    "How do I make pancakes?",
    "What is 12 + 30?",
    "Explain rain to a child.",
    "Which of the animals is the largest?",
    "Say goodbye to me by name.",
)
NAMES = ("Ada", "Bo", "Cleo", "Dag", "Eva", "Finn", "Gro", "Hal")
Figures = dict[str, int]


def exactness(
    model: str,
    data: Path,
    turns: int = len(SAYINGS),
    settings: tuple[str, ...] = (),
    chunk_tokens: str = "32",
) -> Figures:
    """Return token counts: of replies (and how many are wrong), and of history by where its KV was."""
    folder = resolve_model(model, report)
    process = ServeProcess(
        data,
        *(str(folder), *SETTINGS, *settings),
        engine="model",
        parameters={"settings": {"chunk_tokens": chunk_tokens}},
    )
    address = process.start(600.0)
    figures: Figures = dict.fromkeys(
        ("device", "host", "recomputed", "replies", "wrong", "ties"), 0
    )
    failures: list[BaseException] = []
    lock = threading.Lock()

    def talk(name: str) -> None:
        try:
            with Client(address) as client:
                conversation = client.conversation(name)
                for number in range(turns):
                    saying = SAYINGS[number % len(SAYINGS)].format(name=name)
                    usage = conversation.ask(
                        saying, temperature=0.0, max_tokens=REPLY_TOKENS_MAX
                    ).usage
                    with lock:
                        figures["device"] += usage.device_tokens
                        figures["host"] += usage.host_tokens
                        figures["recomputed"] += usage.recomputed_tokens
        except BaseException as error:
            failures.append(error)

    try:
        threads = [threading.Thread(target=talk, args=(name,)) for name in NAMES[:PEOPLE]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        reference = Reference(folder)
        with Client(address) as client:
            for name in NAMES[:PEOPLE]:
                messages = list(client.conversation(name).messages(include_token_ids=True))
                for kind, count in zip(
                    ("replies", "wrong", "ties"), reference.wrong_of(messages), strict=True
                ):
                    figures[kind] += count
    finally:
        process.stop()
    return figures


def problems(figures: Mapping[str, int]) -> list[str]:
    """Return the reasons why these counts do not show that replies are exact."""
    found = [f"{figures['wrong']} of {figures['replies']} tokens are wrong"] * bool(
        figures["wrong"]
    )
    never = [kind for kind in ("device", "host", "recomputed", "replies") if not figures[kind]]
    return found + [f"there were no tokens of the kind {kind!r}" for kind in never]


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2", help="as `pensieve serve` takes it")
    parser.add_argument(
        "--turns", type=int, default=len(SAYINGS), help="of each of the eight people"
    )
    parser.add_argument("--results", type=Path, help="write the figures into this file, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pensieve-exact-") as folder:
        figures = exactness(given.model, Path(folder) / "data", given.turns)
    found = problems(figures)
    if given.results is not None:
        given.results.write_text(json.dumps({"counts": figures, "failures": found}) + "\n")
    print(
        f"{figures['replies']:,} tokens of replies: {figures['wrong']} wrong, {figures['ties']} ties; of "
        f"their histories {figures['device']:,} tokens came from the device, {figures['host']:,} from the "
        f"host, {figures['recomputed']:,} were computed again"
    )
    for each in found:
        print(each)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
