"""The settings of daemons that share a history, and of the process that has it for them."""

from __future__ import annotations

from pensieve.config.parsing import file, number
from pensieve.config.setting import Setting, Table

HISTORY_ADDRESS = "127.0.0.1:50060"
LEASE_SECONDS = 10.0

HISTORY_SECRET = Setting(
    "history_secret",
    file,
    "",
    "a file with the secret that daemons and `pensieve history` share",
    "FILE",
    "history",
)
HISTORY_CA = Setting(
    "history_ca",
    file,
    "",
    "with historys://…, the certificate authority of the history service, PEM",
    "FILE",
    "history",
)
SHARING: Table = (
    Setting(
        "announce",
        str,
        "",
        "where the other daemons and routers reach this one, if that is not --address (it may be 0.0.0.0): "
        "gRPC there, HTTP and metrics at the same host and their own ports",
        "HOST:PORT",
        "history",
    ),
    HISTORY_SECRET,
    HISTORY_CA,
)
HISTORY_SERVICE: Table = (
    Setting(
        "history_address",
        str,
        HISTORY_ADDRESS,
        "where to listen (port 0: any free one)",
        "HOST:PORT",
        "listening",
        spelled="--address",
    ),
    Setting(
        "lease",
        number(0.5, 3600),
        f"{LEASE_SECONDS:g}",
        "a daemon that is not heard of for so long has left: its conversations are anybody's",
        "SECONDS",
        "history",
    ),
    Setting(
        "event_log",
        file,
        "",
        "append who has which conversation, and since when, to this file, as JSON lines without text",
        "FILE",
        "history",
    ),
)
