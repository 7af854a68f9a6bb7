"""The settings of whoever talks to a daemon: where it is, and how replies are drawn."""

from __future__ import annotations

from pensieve.config.parsing import file, number, switch, whole
from pensieve.config.setting import Setting, Table

REACHING: Table = (
    Setting(
        "daemon",
        str,
        "",
        "a daemon's HOST:PORT or unix:PATH; several that have one history with commas between",
        "A",
        "daemon",
        "--address",
    ),
    Setting("token", str, "", "token for that daemon", "TOKEN", "daemon", secret=True),
    Setting(
        "tls",
        switch,
        "",
        "connect with TLS, and trust the authorities that this system trusts",
        group="daemon",
    ),
    Setting(
        "tls_ca",
        file,
        "",
        "connect with TLS, and trust this authority alone, PEM",
        "FILE",
        "daemon",
    ),
)
LOOKING: Table = (
    Setting(
        "replicas",
        str,
        "",
        "several daemons that are looked at as one; a name may be left out. Or history://HOST:PORT: those "
        "that share this history",
        "NAME=A,…",
        "daemon",
    ),
)
TALKING: Table = (
    Setting("system", str, "", "system prompt of new conversations", "TEXT", "talking"),
    Setting(
        "stats", switch, "", "print after each reply where its tokens came from", group="talking"
    ),
    Setting("plain", switch, "", "show replies as they come, and not as Markdown", group="talking"),
    Setting("temperature", number(0, 100), "", "temperature; 0 is greedy", "T", "sampling"),
    Setting(
        "top_p", number(0, 1), "", "keep the likeliest tokens up to this share", "P", "sampling"
    ),
    Setting(
        "min_p",
        number(0, 1),
        "",
        "leave out tokens less likely than this share of the likeliest",
        "P",
        "sampling",
    ),
    Setting(
        "top_k",
        whole(0, 1 << 31),
        "",
        "keep so many of the likeliest tokens (0: all)",
        "K",
        "sampling",
    ),
    Setting(
        "max_tokens",
        whole(1, 1 << 31),
        "",
        "most tokens of a reply (default: 1024)",
        "N",
        "sampling",
    ),
    Setting("seed", whole(0, (1 << 64) - 1), "", "of the random numbers", "N", "sampling"),
)
