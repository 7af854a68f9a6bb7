"""The settings of ranks on other machines: of the engine that awaits them, and of `pensieve rank`."""

from __future__ import annotations

from pensieve.config.parsing import file, number, whole
from pensieve.config.setting import Setting, Table

RANKS: Table = (
    Setting(
        "rank_address",
        str,
        "",
        "where ranks of other machines connect (`pensieve rank`): an address of this machine in a network "
        "that nobody else can reach; activations are neither encrypted nor authenticated",
        "HOST:PORT",
    ),
    Setting(
        "ranks_elsewhere",
        whole(0, 4096),
        "0",
        "so many of the ranks come from other machines (0: those of all stages but the last one)",
        "N",
    ),
    Setting(
        "rank_secret",
        file,
        "",
        "file with a secret that the machines of all ranks have, 16 bytes or more",
        "FILE",
    ),
    Setting(
        "rank_wait",
        number(1, 86_400),
        "300",
        "how long the engine waits for them when it starts",
        "SECONDS",
    ),
)
RANKING: Table = (Setting("leader", str, "", "the engine's --rank-address", "HOST:PORT"),)
