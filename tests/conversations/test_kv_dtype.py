"""`--kv-dtype int8`: the same replies with and without memory pressure, and where this setting is shown."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pensieve.cli.main import main
from pensieve.client import Client
from pensieve.client.admin import Admin
from pensieve.core.iteration import Slice
from pensieve.engine.messages import CheckIntegrity
from pensieve.kernels.cpu_library import compiled_library
from pensieve.model.attention import PagedPass
from pensieve.model.batch import Batch
from pensieve.model.kv.memory import KVMemory
from pensieve.model.loader import load
from tests.conversations.rig import Crowd, Reference, figures, query, started, write_model
from tests.conversations.rig_daemon import ServeProcess
from tests.text.families import QWEN_2_5

pytestmark = pytest.mark.skipif(
    compiled_library() is None,
    reason="without compiled kernels, a result depends on the other rows of its batch",
)
FIRED = (
    *("chunks_swapped_out", "chunks_swapped_in", "chunks_dropped", "chunks_copied_on_write"),
    *("suspensions", "resumptions", "recomputed_tokens"),
)


class Int8KvReference(Reference):
    """The same model with KV of the same type, run over a whole log at once."""

    def __init__(self, folder: Path) -> None:
        self.loaded = load(folder, kv_dtype="int8")

    def logits(self, log: Sequence[int]) -> torch.Tensor:
        length = len(log)
        memory = KVMemory(self.loaded.shape, -(-length // 32), 0, 32)
        pages = array("i", range(memory.device_pages))
        batch = Batch.from_slices([Slice(0, 0, length, array("I", log), pages, True)], 32)
        all_positions = torch.arange(length)
        forward_pass = PagedPass(batch, memory, wait_layer=lambda layer: None)
        return self.loaded.flat.logits(
            batch.input_ids, batch.positions, all_positions, forward_pass
        )


@pytest.mark.parametrize("policy", ["return", "lru"])
def test_every_int8_reply_under_pressure_equals_a_single_pass_over_its_log(
    tmp_path: Path, policy: str
) -> None:
    """Exact to the last bit: a sampled token has the largest logit, not one close to it."""
    shape = {"policy": policy, "chunk_tokens": "32", "kv_dtype": "int8"}
    shape |= {"device_cache": "800t", "host_cache": "800t", "check_kv": "true"}
    folder = write_model(tmp_path / "model", QWEN_2_5)
    total: Counter[str] = Counter()
    with started(folder, tmp_path / "data", **shape) as runtime:
        crowd = Crowd(runtime, seed=4, size=30)
        crowd.run(170)
        crowd.rush()
        crowd.run(40)
        now = figures(runtime)
        total.update({name: int(value) for name, value in now.items() if name in FIRED})
        assert now["chunks_damaged"] == 0
        assert query(runtime, CheckIntegrity(2)).problems == ()
        reference = Int8KvReference(folder)
        counts = [reference.wrong_tokens(runtime, name) for name in crowd.names]
    assert not [name for name in FIRED if not total[name]], f"never happened: {dict(total)}"
    sampled, wrong, ties = (sum(column) for column in zip(*counts, strict=True))
    assert sampled > 700
    assert (wrong, ties) == (0, 0)


def test_replies_with_small_int8_caches_equal_replies_with_large_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, list[str]] = {}
    for size, caches in {"tiny": "400t", "large": "20000t"}.items():
        tiers = ("--device-cache", caches, "--host-cache", caches)
        process = ServeProcess(
            tmp_path / size, "--kv-dtype", "int8", "--threads", "1", *tiers, engine="model"
        )
        admin = Admin(f"unix:{tmp_path / size / 'admin.sock'}")
        with Client(process.start()) as client, admin:
            conversations = [client.conversation(f"c{i}") for i in range(6)]
            for each in conversations:
                each.create()
            said[size] = [
                each.ask(f"Tell me of number {i}, {turn}.", max_tokens=40, ignore_eos=True).text
                for turn in range(3)
                for i, each in enumerate(conversations)
            ]
            dropped = admin.stats().more["chunks_dropped"]
            assert (dropped > 0) == (size == "tiny")
            assert client.server_info().kv_dtype == "int8"
            assert client.server_info().dtype.startswith(("float", "bfloat"))
        assert main(["admin", "info", "--data", str(tmp_path / size)]) == 0
        assert ", native weights, int8 KV, on cpu\n" in capsys.readouterr().out
        assert process.stop() == 0
        log = process.log.read_text()
        assert "KV pools: device" in log
        assert ", in int8" in log
        messages = [json.loads(line)["message"] for line in log.splitlines() if line[0] == "{"]
        assert any("serving built-in" in each and ", int8 KV, " in each for each in messages)
    assert said["tiny"] == said["large"]
    assert len(set(said["tiny"])) > 3
