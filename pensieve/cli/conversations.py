"""`pensieve conversations`: list, show, export, import and delete the conversations of a running daemon.

The command is an ordinary client, so it sees the conversations of its token's tenant. An export streams
message by message, and its output file appears only when it is complete. An import reports each invalid line
by its number, and imports the other lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pensieve.cli.flags import add_settings, with_settings
from pensieve.cli.reaching import address_of
from pensieve.config import REACH, Resolved, settings_for, settings_named
from pensieve.errors import AlreadyExists, ConfigError, InvalidArgument, NotFound, PensieveError

if TYPE_CHECKING:
    from pensieve.cli.conversation_table import Cached
    from pensieve.client import Client, ConversationState

LINE_BYTES_MAX = 1 << 30  # limit for an imported line; larger than any context
SPOOL_BYTES = 1 << 20  # larger exported lines are buffered in a file instead of memory
LISTED = 50  # conversations that `ls` lists by default
TIMEOUT_SECONDS = 60.0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "conversations",
        help="list, show, export, import and delete conversations",
        description="Manage the conversations of a running daemon. Without --address, the command uses the "
        "daemon that has the data folder.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def command(
        name: str, act: Callable[[Client, argparse.Namespace], int], text: str, more: str = ""
    ) -> Any:
        sub = kinds.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
        add_settings(sub, (*settings_for(REACH), *settings_named("data")))
        sub.set_defaults(
            run=with_settings(lambda arguments, resolved: _run(act, arguments, resolved))
        )
        return sub

    ls_parser = kinds.add_parser(
        "ls",
        help="list conversations, the newest first",
        description="List conversations, the newest first: title, age, size, what the daemon has cached of "
        "them, and the id. A long id is shortened. The other commands accept the beginning of an id when you "
        "type them on a terminal.",
    )
    add_settings(ls_parser, (*settings_for(REACH), *settings_named("data")))
    ls_parser.set_defaults(run=with_settings(ls))
    ls_parser.add_argument(
        "--limit",
        type=_count,
        metavar="N",
        help=f"list at most N (default: {LISTED}; with --json: all)",
    )
    ls_parser.add_argument(
        "--json", action="store_true", help="print a line of JSON for each conversation"
    )
    show_parser = command("show", show, "print the messages of a conversation")
    show_parser.add_argument("id", metavar="ID", help="id of the conversation")
    show_parser.add_argument(
        "--json", action="store_true", help="print the line that export writes"
    )
    export_parser = command(
        "export",
        export,
        "write conversations as lines of JSON",
        "Each line has an id, metadata, tools, template_options, and messages in the format of OpenAI's API.",
    )
    export_parser.add_argument("id", nargs="*", metavar="ID", help="ids of the conversations")
    export_parser.add_argument(
        "--all", action="store_true", help="all conversations, the newest first"
    )
    export_parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the lines to FILE (default: standard output)",
    )
    import_parser = command(
        "import",
        import_,
        "create conversations from lines of JSON",
        "FILE has the format that export writes; a line needs only `messages`. The chat template tokenizes "
        "them anew, so the tokens of a reply may differ from those that were sampled.",
    )
    import_parser.add_argument(
        "file", metavar="FILE", help="file with the lines; `-`: standard input"
    )
    import_parser.add_argument(
        "--new-ids", action="store_true", help="give each conversation a new id, and print the ids"
    )
    rm_parser = command("rm", remove, "delete conversations, also on disk")
    rm_parser.add_argument("id", nargs="+", metavar="ID", help="ids of the conversations")
    rm_parser.add_argument("--yes", action="store_true", help="delete without asking")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


def _client(resolved: Resolved) -> Client:
    from pensieve.client import Client

    address, tls = address_of(resolved)
    return Client(address, token=resolved.settings.token, tls=tls, timeout=TIMEOUT_SECONDS)


def _run(
    act: Callable[[Client, argparse.Namespace], int],
    arguments: argparse.Namespace,
    resolved: Resolved,
) -> int:
    with _client(resolved) as client:
        return act(client, arguments)


def _find(client: Client, conversation_id: str) -> str:
    """Return the id of the conversation that the user means.

    Without a terminal, only a full id is accepted, because a program cannot see which conversation was found.
    """
    from pensieve.cli.conversation_table import id_with_beginning

    return id_with_beginning(client, conversation_id) if sys.stdin.isatty() else conversation_id


# -- looking --


def ls(arguments: argparse.Namespace, resolved: Resolved) -> int:
    from pensieve.cli.conversation_table import cached_by_id, table_of
    from pensieve.client import Retry
    from pensieve.client.admin import Admin

    address, tls = address_of(resolved)
    token = resolved.settings.token
    admin = partial(Admin, address, token=token, tls=tls, retry=Retry(retries=0))
    limit = arguments.limit or (None if arguments.json else LISTED)
    with _client(resolved) as client:
        states = client.conversations()
        if arguments.json:
            held = cached_by_id(admin)
            for each in islice(states, limit):
                values = {**_plain(each), **_cached_tokens(each, held)}
                print(json.dumps(values, ensure_ascii=False))
            return 0
        assert limit is not None
        found = list(islice(states, limit + 1))
    print("\n".join(table_of(found[:limit], cached_by_id(admin))) or "no conversations yet")
    if len(found) > limit:
        print(f"older conversations are not shown: try --limit {10 * limit}", file=sys.stderr)
    return 0


def _cached_tokens(state: ConversationState, held: Cached | None) -> dict[str, int | None]:
    """Return how many tokens of the conversation are in each tier. The numbers are None if `held` is None."""
    if held is None:
        return {"device_tokens": None, "host_tokens": None}
    found = held.get(state.conversation_id)
    return {
        "device_tokens": found.device_tokens if found else 0,
        "host_tokens": found.host_tokens if found else 0,
    }


def _plain(state: ConversationState) -> dict[str, Any]:
    values = asdict(state)
    for name in ("created_at", "updated_at"):
        values[name] = values[name].isoformat()
    return values


def show(client: Client, arguments: argparse.Namespace) -> int:
    from pensieve.cli.conversation_lines import line_of
    from pensieve.cli.markdown import without_control

    conversation = client.conversation(_find(client, arguments.id))
    if arguments.json:
        sys.stdout.writelines(line_of(conversation.get(), conversation.messages(cut_replies=True)))
        return 0
    for each in conversation.messages():
        text = without_control(each.text) if sys.stdout.isatty() else each.text
        print(f"{each.role}: {text}")
    return 0


# -- export and import --


def export(client: Client, arguments: argparse.Namespace) -> int:
    from pensieve.cli.conversation_lines import line_of

    if bool(arguments.id) is arguments.all:
        raise InvalidArgument("ID", "either name conversations or pass --all")
    code = num_written = 0
    with _output(arguments.output) as file:
        for conversation_id in _chosen_ids(client, arguments):
            conversation = client.conversation(conversation_id)
            try:
                # Write only complete lines, because the conversation may be deleted meanwhile.
                with tempfile.SpooledTemporaryFile(SPOOL_BYTES, "w+", encoding="utf-8") as line:
                    line.writelines(
                        line_of(conversation.get(), conversation.messages(cut_replies=True))
                    )
                    line.seek(0)
                    shutil.copyfileobj(line, file)
            except NotFound as error:
                if arguments.all:  # the conversation was deleted meanwhile
                    continue
                code = _complain(f"{conversation_id}: {error}")
            else:
                num_written += 1
    if arguments.output is not None:
        print(f"{num_written} conversations exported")
    return code


def _chosen_ids(client: Client, arguments: argparse.Namespace) -> Iterable[str]:
    if not arguments.all:
        return dict.fromkeys(_find(client, each) for each in arguments.id)
    return (each.conversation_id for each in client.conversations())


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    """Yield standard output, or a file that appears only when it is complete."""
    if path is None:
        yield sys.stdout
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def import_(client: Client, arguments: argparse.Namespace) -> int:
    from pensieve.cli.conversation_lines import parse_line

    code = num_made = 0
    with _input(arguments.file) as file:
        for number, line in enumerate(_lines(file), start=1):
            try:
                if len(line) > LINE_BYTES_MAX:
                    raise InvalidArgument("the line", f"has more than {LINE_BYTES_MAX:,} bytes")
                given = parse_line(line)
                name = None if arguments.new_ids else given.conversation_id
                made = client.conversation(name).create(
                    system_prompt=given.system_prompt,
                    tools=given.tools,
                    template_options=given.template_options,
                    metadata=given.metadata,
                    messages=given.messages,
                )
            except (InvalidArgument, AlreadyExists) as error:
                code = _complain(f"line {number}: {error}")
                continue
            num_made += 1
            if name is None:
                print(made.conversation_id)
    print(f"{num_made} conversations imported", file=sys.stderr)
    return code


@contextlib.contextmanager
def _input(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    with file:
        yield file


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines that are not blank. If a line is too long, yield only its beginning."""
    while line := file.readline(LINE_BYTES_MAX + 1):
        rest = line
        while len(rest) > LINE_BYTES_MAX and not rest.endswith(b"\n"):
            rest = file.readline(LINE_BYTES_MAX + 1)
        if line.strip():
            yield line


def remove(client: Client, arguments: argparse.Namespace) -> int:
    names = list(dict.fromkeys(arguments.id))
    if not arguments.yes and sys.stdin.isatty():
        names = list(dict.fromkeys(_find(client, each) for each in names))
        if not _is_confirmed(client, names):
            print("nothing is deleted", file=sys.stderr)
            return 1
    code = 0
    for name in names:
        try:
            client.conversation(name).delete()
        except PensieveError as error:
            code = _complain(f"{name}: {error}")
        else:
            print(f"deleted {name}")
    return code


def _is_confirmed(client: Client, names: list[str]) -> bool:
    from pensieve.cli.conversation_table import table_of

    states = [client.conversation(each).get() for each in names]
    print("\n".join(table_of(states, None)))
    subject = "this conversation" if len(names) == 1 else f"these {len(names)} conversations"
    try:
        answer = input(f"Delete {subject} for good? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _complain(line: str) -> int:
    print(f"! {' '.join(line.split())}", file=sys.stderr)
    return 1
