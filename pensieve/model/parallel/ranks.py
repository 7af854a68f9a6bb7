"""Define a rank of a model on several devices: its place in the process group and its part of the model.

Every rank is a process.  Stages divide the layers (stages.py), and the *shards* of a stage divide each of its
layers, by the plan that `transformers` has for the model.  A shard has some of the heads, and the KV of those
heads in its own two tiers.  All shards of a stage call the same layers in the same order.  `transformers`
adds or gathers their results with torch.distributed (NCCL between GPUs, gloo between processes on a CPU).

    rank            0, 1, …, T-1        T, …, 2T-1          …
    stage           the last one        the first one       …

There are S stages of T shards.  Shard t of a stage sends to shard t of the next stage.

The processes run on one machine or on several (arrivals.py).  They find each other through a key-value store
on rank 0 (rank_store.py). They communicate over one network interface of each machine, or over the GPUs' own
links.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pensieve.errors import ConfigError
from pensieve.extras import need
from pensieve.model.attention import FlatModel, ForwardPass
from pensieve.model.parallel.rank_store import RankStore

_SIOCGIFADDR = 0x8915
COLLECTIVE_SECONDS = 60.0  # a collective fails if a rank does not take part for this long


class Rank(ABC):
    """This process as one of `num_ranks`: a shard of a stage, which has some of the layers.

    Rank 0 is a shard of the last stage, where tokens are sampled.  The other ranks follow in the order of the
    stages.
    """

    def __init__(self, index: int, num_ranks: int, num_stages: int = 1) -> None:
        assert num_ranks % num_stages == 0, "stages must have equally many shards"
        self.index = index
        self.num_ranks = num_ranks
        self.num_stages = num_stages
        self.num_shards = num_ranks // num_stages
        row, self.shard = divmod(index, self.num_shards)
        self.stage = (row - 1) % num_stages
        # The ranks before and after this rank in the pipeline.
        self.before, self.after = (
            self.shard + self.num_shards * (neighbour % num_stages)
            for neighbour in (row - 1, row + 1)
        )
        self._in_group = False

    @abstractmethod
    def wait_until_all_loaded(self) -> None:
        """Return when every rank has called this, however long it takes; raise if a rank has ended."""

    @abstractmethod
    def store(self) -> RankStore:
        """Return the key-value store in which the ranks find each other."""

    def enter_group(self, device: torch.device, address: str = "") -> None:
        """Enter the process group; all ranks must do so at the same time.

        `address` is the address of this machine's interface to the other ranks; empty if there is one
        machine.
        """
        if dist.is_initialized():
            raise ConfigError("this process already runs another model on several ranks")
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        interface = interface_of(address) if address else _loopback()
        if address or not cuda:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if address:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        # torch keeps only the C++ part of the store. Without this reference, the Python part would be freed.
        self._group_store = self.store()
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=self._group_store,
            rank=self.index,
            world_size=self.num_ranks,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        self._in_group = True

    def exit_group(self) -> None:
        if self._in_group:
            dist.destroy_process_group()
            self._in_group = False

    def agree_on(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return rank 0's token ids, on every rank."""
        dist.broadcast(input_ids, src=0)
        return input_ids


class ParallelModel(FlatModel):
    """Run this rank's part of a model; every rank calls it for the same batch, with rank 0's token ids.

    A collective sends the ids between devices.  So rank 0 can also send a token that its host does not know
    yet, because an earlier iteration has sampled it on the device.
    """

    def __init__(self, module: Any, rank: Rank) -> None:
        super().__init__(module)
        self.alone = False
        self._rank = rank
        limit_group(module)

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        return super().logits(self._rank.agree_on(input_ids), positions, rows, forward_pass)


def limit_group(module: Any) -> None:
    """Lower the timeout of the shards' group; transformers sets it to half an hour."""
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.distributed_c10d._set_pg_timeout(timeout, module._device_mesh.get_group("tp"))


def check_machine(device: torch.device) -> None:
    """Raise ConfigError unless ranks of this machine can share each layer."""
    need("parallel", "accelerate", "--tensor-parallel")
    if device.type == "cpu" and torch.accelerator.is_available():
        # transformers would put the parts on the accelerators
        raise ConfigError(
            "--tensor-parallel on the CPU needs an empty CUDA_VISIBLE_DEVICES: "
            "transformers puts the parts of a model on accelerators if there are any"
        )


def check_devices(device: torch.device, num_ranks: int) -> None:
    """Raise ConfigError if ranks should run on GPUs and this machine has too few of them."""
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks of this machine need as many GPUs. It has {torch.cuda.device_count()}"
        )


def interface_of(address: str) -> str:
    """Return the name of the interface with this address, for gloo and NCCL."""
    if sys.platform != "linux":
        raise ConfigError("ranks on several machines need Linux")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wanted = socket.inet_pton(family, address.partition("%")[0])
    if family == socket.AF_INET6:
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            hexed, *_, name = line.split()
            if bytes.fromhex(hexed) == wanted:
                return name
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # this interface has no address
                    if fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24] == wanted:
                        return name
        if wanted[0] == 127:
            return _loopback()  # any 127.x address belongs to this machine
    raise ConfigError(f"no interface of this machine has the address {address}")


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
