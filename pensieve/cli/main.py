"""The command `pensieve`: parse the command line, run one command, and convert errors to exit codes."""

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
    cells,
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
from pensieve.errors import (
    ConfigError,
    NotFound,
    PensieveError,
    StoreLocked,
    Unauthenticated,
    Unavailable,
)
from pensieve.extras import package_of
from pensieve.launch.cpu_threads import prepare_threads

SIMILARITY = 0.65  # minimum similarity of a suggestion
# (class, words, remedy): the remedy for an error of this class whose message contains these words.
REMEDIES: tuple[tuple[type[PensieveError], str, str], ...] = (
    (
        Unavailable,
        "nothing listens at",
        "Start a daemon with `pensieve serve`, or name another one with --address",
    ),
    (Unauthenticated, "token", "Pass the client's token with --token, or set PENSIEVE_TOKEN"),
    (StoreLocked, "the data folder", "Stop that program, or choose another folder with --data"),
    (NotFound, "there is no conversation", "`pensieve conversations ls` lists them"),
    (NotFound, "there is no job", "`pensieve admin jobs` lists them"),
    (NotFound, "there is no prefix", "`pensieve admin prefixes` lists them"),
)


class Command(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion and a pointer to the help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            suggestion = _suggestion(
                flag, [each for each in self._option_string_actions if each[:2] == "--"]
            )
            what = "unknown flag" if flag.startswith("-") else "unexpected argument"
            self.error(f"{what} {flag}{suggestion}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(each) for each in action.choices or ()]
        if not choices or value in (action.choices or ()):
            return
        near = _suggestion(str(value), choices) or f"; choose one of {', '.join(choices)}"
        self.error(f"unknown {_name_of(action)} {str(value)!r}{near}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self.error(f"{_name_of(action)} {_expectation(action, arg_strings) or error.message}")

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace(
            ": expected one argument", " needs a value"
        )
        message = message.replace("the following arguments are required:", "missing arguments:")
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the arguments\n")


def _name_of(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar or action.dest).lower()


def _expectation(action: argparse.Action, given: Sequence[str]) -> str:
    """Say which values an argument accepts. Return "" if argparse's own error message is sufficient."""
    parse = action.type
    if parse in (int, float):
        return f"must be a {'whole ' if parse is int else ''}number, not {' '.join(given)!r}"
    try:
        for each in given:
            parse(each) if callable(parse) else None
    except argparse.ArgumentTypeError:
        return ""
    except ValueError as error:
        return f"{error}, not {' '.join(given)!r}" if error.args else ""
    return ""


def _suggestion(given: str, known: Iterable[str]) -> str:
    """Suggest the most similar known word. Leading dashes do not count for the similarity."""
    words = {each.strip("-"): each for each in known}
    near = difflib.get_close_matches(given.strip("-"), list(words), 1, SIMILARITY)
    return f". Did you mean {words[near[0]]}?" if near else ""


def parser() -> argparse.ArgumentParser:
    top = Command(
        prog="pensieve",
        description="Stateful serving of chat with large language models.",
        epilog="`pensieve COMMAND --help` describes a command. Exit codes: 0 success, 1 other errors, "
        "2 wrong usage, 3 configuration or history, 4 model, 5 address in use, 6 device, 7 a replica "
        "did not answer.",
    )
    top.add_argument("--version", action="version", version=f"pensieve {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    talk = commands.add_parser(
        "chat",
        help="talk to a model in this terminal",
        description="Talk to a model. The chat uses the daemon at --address, or the `pensieve serve` that "
        "has the data folder, or else starts a daemon of its own. Conversations are kept in the data folder. "
        "With piped input, standard output has only the replies.",
    )
    chat.add_arguments(talk)
    add_settings(talk, settings_for(REACH, TALK, ENGINE))
    talk.set_defaults(run=with_settings(chat.run))
    daemon = commands.add_parser(
        "serve",
        help="run the daemon that remembers conversations",
        description="Serve conversations over gRPC, and with --http over the OpenAI and Anthropic APIs. "
        "Clients send only new messages; the tokens of a conversation and their KV stay between turns.",
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
    cells.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if list(words[:1]) == ["history"]:
        print(f"pensieve: {MOVED_HISTORY}", file=sys.stderr)
        return ConfigError.exit_code
    arguments = parser().parse_args(words)
    # The engine sets the number of threads, so tokenizers uses none of its own. Without this variable,
    # tokenizers also warns about each child process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Pensieve reports an error in one line. Without this variable, gRPC logs several lines before that.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    prepare_threads()
    try:
        code: int = arguments.run(arguments)
        return code
    except PensieveError as error:
        print(f"pensieve: {_with_remedy(error)}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (package := package_of(error)) is None:
            raise
        print(
            f"pensieve: {arguments.command} needs the package {package}, which is not installed. "
            f"`pip install {package}` installs it; `pensieve doctor` lists all that is missing",
            file=sys.stderr,
        )
        return 3
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _with_remedy(error: PensieveError) -> str:
    """Return an error in one line, with a remedy for users of the command line."""
    text = " ".join(str(error).split())
    remedies = [
        remedy for kind, words, remedy in REMEDIES if isinstance(error, kind) and words in text
    ]
    return f"{text}. {remedies[0]}" if remedies else text


if __name__ == "__main__":
    sys.exit(main())
