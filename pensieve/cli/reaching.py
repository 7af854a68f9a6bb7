"""Find or start the daemon for `pensieve chat` and `pensieve batch`.

The command uses the daemon at --address, or the daemon that has the data folder open. If there is none, the
command starts a daemon in its own process, on a private socket in the data folder
(launch/embedded_daemon.py). Flags that have no effect on a running daemon are an error."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pensieve.cli.ctrl_c import CtrlC
from pensieve.cli.flags import tls_to
from pensieve.config import ENGINE, REACH, Resolved, settings_for
from pensieve.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    ServerFault,
    Unavailable,
)

if TYPE_CHECKING:
    from pensieve.client import Client, ServerInfo
    from pensieve.client.channel import Tls
    from pensieve.launch.embedded_daemon import EmbeddedDaemon


def daemon_of(data: Path) -> str | None:
    """Return the socket address of the `pensieve serve` that has the data folder open, or None."""
    from pensieve.api.grpc.admin_socket import is_listened_to, socket_address, socket_path
    from pensieve.store.folder import holder_of

    holder = holder_of(data)
    if not holder.startswith("pensieve serve"):
        return None
    try:
        path = socket_path(data)
    except ConfigError:
        return None
    if not is_listened_to(path):
        return None
    print(f"using {holder}, which has the data folder {data} open", file=sys.stderr, flush=True)
    return socket_address(path)


def address_of(resolved: Resolved) -> tuple[str, Tls]:
    """Return the address and TLS settings of a running daemon. Raises ConfigError if there is none."""
    from pensieve.api.grpc.admin_socket import is_listened_to, socket_address, socket_path

    address, data = resolved.settings.daemon, resolved.settings.data
    if address is None:
        path = socket_path(data)
        if not is_listened_to(path):
            reason = (
                f"a killed daemon left the socket {path}"
                if path.exists()
                else f"there is no socket {path}"
            )
            raise ConfigError(
                f"no daemon has the data folder {data} ({reason}). `pensieve serve` starts one. To use "
                "another daemon, pass --data or --address"
            )
        address = socket_address(path)
    return address, tls_to(address, resolved)


def check_engine_flags(resolved: Resolved, address: str, info: ServerInfo | None) -> None:
    """Raise InvalidArgument for flags that have no effect, because the daemon is already running.

    Such settings from variables and files are ignored.
    """
    from pensieve.launch.model_folder import model_name

    given = [
        "MODEL" if setting.name == "model" else setting.flag
        for setting in settings_for(ENGINE)
        if setting.name != "data" and resolved.sources[setting.name] == "flag"
    ]
    if "MODEL" in given and info is not None and model_name(resolved.settings.model) == info.model:
        given.remove("MODEL")
    if given:
        raise InvalidArgument(
            ", ".join(given),
            f"the daemon at {address} has its own model and settings; leave these flags out",
        )


def check_reach_flags(resolved: Resolved) -> None:
    """Raise InvalidArgument for flags such as --token or --tls without --address.

    The socket in the data folder uses neither a token nor TLS.
    """
    given = [each.flag for each in settings_for(REACH) if resolved.sources[each.name] == "flag"]
    if given:
        raise InvalidArgument(", ".join(given), "of no use without --address, which names a daemon")


def start_daemon(
    stack: contextlib.ExitStack, resolved: Resolved, holder: str, quiet: bool, ctrl_c: CtrlC
) -> EmbeddedDaemon:
    """Start a daemon in this process, and wait until it is ready. Ctrl-C ends the program."""
    from pensieve.conversations.engine_child import EarlyEngine
    from pensieve.launch.programs import engine_program

    program = engine_program(resolved)
    log_errors(stack)
    make_model(resolved.settings.model, ctrl_c)
    early = stack.enter_context(EarlyEngine(program))
    with status(quiet) as report:
        report("opening the history")
        from pensieve.launch.embedded_daemon import EmbeddedDaemon

        return stack.enter_context(
            EmbeddedDaemon(resolved, holder, report, program, lambda: ctrl_c.pressed, early.take)
        )


def make_model(model: str, ctrl_c: CtrlC) -> None:
    """Download or convert the model if it is used for the first time. Progress lines stay on the screen."""
    from pensieve.launch.model_folder import needs_conversion, resolve_model

    def check() -> None:
        if ctrl_c.pressed:
            raise KeyboardInterrupt

    if needs_conversion(model):
        resolve_model(model, lambda line: print(line, file=sys.stderr, flush=True), check)


def server_info_of(client: Client) -> ServerInfo | None:
    """Return the daemon's server_info, and so check address, TLS and token before the user types anything.

    Returns None if the daemon has an earlier version, without the method server_info. Raises Unavailable if
    no daemon can be reached, or if the only daemon is draining. A daemon that is loading its model counts as
    reachable, because the first request waits for the model.
    """
    try:
        info = client.server_info()
    except ServerFault:  # a daemon of an earlier version has no server_info
        return None
    except (Unavailable, DeadlineExceeded) as error:
        raise Unavailable(f"no daemon can be reached at {client.address}: {error}") from error
    # With several addresses, another daemon accepts the turns.
    if info.state == "draining" and len(client.addresses) == 1:
        raise Unavailable(
            f"the daemon at {client.address} is draining: it takes no new turns, and will exit"
        )
    return info


def log_errors(stack: contextlib.ExitStack) -> None:
    """Show errors that the daemon in this process logs."""
    log, handler = logging.getLogger("pensieve"), logging.StreamHandler()
    handler.setLevel(logging.ERROR)
    handler.setFormatter(logging.Formatter("! %(message)s"))
    log.addHandler(handler)
    stack.callback(log.removeHandler, handler)


@contextlib.contextmanager
def status(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports progress on standard error.

    On a terminal, it shows one changing line. Elsewhere, it prints each line unless `quiet` is set.
    """
    if not sys.stderr.isatty():
        yield (
            (lambda line: None)
            if quiet
            else (lambda line: print(line, file=sys.stderr, flush=True))
        )
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        permanent_beginnings = ("KV pools", "chat template", "a turn of", "conversation ")

        def report(line: str) -> None:
            if line.startswith(permanent_beginnings) and not quiet:
                console.print(line, style="dim", highlight=False)
            status.update(line)

        yield report
