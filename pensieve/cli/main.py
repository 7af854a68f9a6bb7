"""The command `pensieve` (parse, run one command, turn errors into an exit code)."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from pensieve import __version__
from pensieve.cli import (
    admin,
    backup,
    batch,
    bench,
    chat,
    cluster,
    conversations,
    copy,
    doctor,
    profile,
    rank,
    serve,
    simulate,
    token,
)
from pensieve.cli.flags import add_settings, with_settings
from pensieve.config import ENGINE, MOVED_HISTORY, REACH, SERVE, TALK, settings_for
from pensieve.errors import ConfigError, PensieveError
from pensieve.extras import package_of
from pensieve.launch.cpu_threads import prepare_threads


class Command(argparse.ArgumentParser):
    """A parser that says what is wrong, what may have been meant, and where to read on."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            meant = _meant(flag, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(
                action, f"{error.message}{_meant(str(value), map(str, action.choices or ()))}"
            ) from None

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists what it takes\n")


def _meant(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(known), 1)
    return f". Did you mean {near[0]}?" if near else ""


def parser() -> argparse.ArgumentParser:
    top = Command(
        prog="pensieve",
        description="Stateful serving of chat with large language models.",
        epilog="`pensieve COMMAND --help` says more. Exit codes: 0, 2 usage, 3 configuration or "
        "history, 4 model, 5 address in use, 6 device, 7 some replicas did not answer.",
    )
    top.add_argument("--version", action="version", version=f"pensieve {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    talk = commands.add_parser(
        "chat",
        help="talk to a model in this terminal",
        description="Talk to a model: through the daemon at --address, else through a `pensieve serve` "
        "that has the data folder, else through one that is started for this chat. Conversations stay in "
        "the data folder. Where lines are piped in, replies are all that is on standard output.",
    )
    chat.add_arguments(talk)
    add_settings(talk, settings_for(REACH, TALK, ENGINE))
    talk.set_defaults(run=with_settings(chat.run))
    daemon = commands.add_parser(
        "serve",
        help="run the daemon that remembers conversations",
        description="Serve conversations over gRPC. Clients name a conversation and send only what is "
        "new; its tokens and their KV stay between turns.",
    )
    add_settings(daemon, settings_for(SERVE, ENGINE))
    daemon.set_defaults(run=with_settings(serve.run))
    batch.add_parser(commands)
    conversations.add_parser(commands)
    admin.add_parser(commands)
    token.add_parser(commands)
    backup.add_parser(commands)
    copy.add_parser(commands)
    doctor.add_parser(commands)
    cluster.add_parser(commands)
    profile.add_parser(commands)
    rank.add_parser(commands)
    bench.add_parser(commands)
    simulate.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if list(words[:1]) == ["history"]:
        print(f"pensieve: {MOVED_HISTORY}", file=sys.stderr)
        return ConfigError.exit_code
    arguments = parser().parse_args(words)
    # Threads come from this side; the library's own would warn of every child process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # What fails is one line of ours; gRPC would write others before it, with times and source files.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    prepare_threads()
    try:
        code: int = arguments.run(arguments)
        return code
    except PensieveError as error:
        print(f"pensieve: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (package := package_of(error)) is None:
            raise
        print(
            f"pensieve: {arguments.command} needs the package {package}, which is not installed; "
            "`pensieve doctor` lists what is missing",
            file=sys.stderr,
        )
        return 3
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
