"""What every rank of a model on several devices has: the process group and its part of the model.

Every rank is a process with a part of each layer, cut by the plan that `transformers` has for the
model: a rank has some of the heads, and the KV of those heads in its own two tiers.  All ranks call
the same layers in the same order; where their parts meet, `transformers` adds or gathers them with
torch.distributed (NCCL between GPUs, gloo between processes on a CPU).

The processes are of one machine.  They find each other by a file in a folder that only their user
may enter (torch's file rendezvous), and communicate over the loopback interface or the GPUs' own links.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pensieve.errors import ConfigError
from pensieve.extras import need
from pensieve.model.attention import FlatModel, ForwardPass

COLLECTIVE_SECONDS = 60.0  # after so long without a rank a collective fails


class Rank(ABC):
    """This process as one of `num_ranks`: a part of each layer, or a stage with some of the layers.

    Rank 0 is the last stage, where tokens are sampled; the others follow in the order of the stages.
    """

    def __init__(self, index: int, num_ranks: int, num_stages: int = 1) -> None:
        assert num_stages in (1, num_ranks), "a stage is one rank"
        self.index = index
        self.num_ranks = num_ranks
        self.num_stages = num_stages
        self.stage = (index - 1) % num_stages
        self.before, self.after = (
            self.stage,
            (self.stage + 2) % num_stages,
        )  # ranks, as stages follow
        self._in_group = False

    @abstractmethod
    def wait_until_all_loaded(self) -> None:
        """Return when every rank has called this, however long it takes; raise when one has ended."""

    def enter_group(self, folder: Path, device: torch.device) -> None:
        """Enter the process group whose rendezvous is in this folder; all ranks do so at the same time."""
        if dist.is_initialized():
            raise ConfigError("this process computes another model on several ranks already")
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.index)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=f"file://{folder / 'store'}",
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
        """Rank 0's token ids, on every rank."""
        dist.broadcast(input_ids, src=0)
        return input_ids


class ParallelModel(FlatModel):
    """This rank's part of a model; every rank calls it for the same batch, and rank 0's ids count.

    The ids are sent by a collective and not with the iteration, so rank 0 may fill them in late: a token that
    an earlier iteration samples is on its device before the host knows it.
    """

    def __init__(self, module: Any, rank: Rank) -> None:
        super().__init__(module)
        self.alone = False
        self._rank = rank
        # transformers makes this group itself, with a timeout of half an hour.
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        dist.distributed_c10d._set_pg_timeout(timeout, module._device_mesh.get_group("tp"))

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        forward_pass: ForwardPass,
    ) -> torch.Tensor:
        return super().logits(self._rank.agree_on(input_ids), positions, rows, forward_pass)


def check_machine(device: torch.device, num_ranks: int) -> None:
    """Raise ConfigError unless this machine can be that many ranks that share each layer."""
    need("parallel", "accelerate", "--tensor-parallel")
    check_devices(device, num_ranks, "--tensor-parallel")
    if device.type == "cpu" and torch.accelerator.is_available():
        # where transformers would put the parts
        raise ConfigError(
            "--tensor-parallel on the CPU needs CUDA_VISIBLE_DEVICES to be empty: "
            "transformers puts the parts of a model on accelerators where there are any"
        )


def check_devices(device: torch.device, num_ranks: int, flag: str) -> None:
    """Raise ConfigError unless there is a GPU for each rank, where they are to be on GPUs."""
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"{flag} {num_ranks} needs as many GPUs; this machine shows {torch.cuda.device_count()}"
        )


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
