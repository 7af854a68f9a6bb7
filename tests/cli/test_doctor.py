"""`pensieve doctor MODEL` and the log of `pensieve serve` tell how a model's layers are run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pensieve.builtin import MODEL_PATH
from pensieve.cli.main import main
from pensieve.client import Client
from pensieve.kernels.cpu_library import compiled_library
from tests.cli.test_errors import pensieve
from tests.conversations.rig_daemon import ServeProcess
from tests.models import SERVED, save_tiny

COMPILED = r"layers in C\+\+ \((amx|avx\w+|plain)\)"
KV = r"KV in b?float\d\d, [\d,]+ bytes a token"
NO_LIBRARY = "layers in torch: pensieve was installed without its compiled kernels"


def test_a_starting_daemon_logs_how_layers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers: list[str] = []

    def said(name: str) -> list[str]:
        process = ServeProcess(tmp_path / name, engine="model")
        with Client(process.start()) as client:
            layers.append(client.server_info().layers)
        assert main(["admin", "info", "--data", str(tmp_path / name)]) == 0
        assert f"runs          {layers[-1]}\n" in capsys.readouterr().out
        assert process.stop() == 0
        logged = (line for line in process.log.read_text().splitlines() if line[0] == "{")
        messages = [json.loads(line)["message"] for line in logged]
        return [message for message in messages if "layers in" in message]

    if compiled_library() is not None:
        (line,) = said("compiled")
        assert re.fullmatch(COMPILED, line)
        assert layers == [line]
    monkeypatch.setenv("PENSIEVE_CPU_LIBRARY", str(tmp_path))
    (line,) = said("torch")
    assert line == layers[-1] == NO_LIBRARY


def test_the_doctor_reports_how_a_models_layers_would_run(tmp_path: Path) -> None:
    if compiled_library() is not None:
        told = pensieve("doctor", str(MODEL_PATH), "--weights", "int8", "--dtype", "bfloat16")
        (line,) = (line for line in told.stdout.splitlines() if line.startswith("model "))
        assert re.fullmatch(rf"model +{re.escape(str(MODEL_PATH))}, {COMPILED}; {KV}", line)
    told = pensieve(
        *("doctor", str(MODEL_PATH), "--device", "cpu", "--json"),
        PENSIEVE_CPU_LIBRARY=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path),
    )
    found = json.loads(told.stdout)["findings"]["model"]
    assert re.fullmatch(rf"{re.escape(str(MODEL_PATH))}, {NO_LIBRARY}; {KV}", found)
    profile = json.loads(told.stdout)["findings"]["profile"]
    assert profile == "no profile of this model on this machine"
    told = pensieve(
        *("doctor", str(MODEL_PATH), "--device", "cpu", "--kv-dtype", "int8"),
        PENSIEVE_CPU_LIBRARY=str(tmp_path),
    )
    assert "; KV in int8, " in told.stdout


def with_texts(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    return folder


def mistral(folder: Path, vocab_size: int = 2560) -> Path:
    config = SERVED["mistral"]()
    config.vocab_size = vocab_size
    return with_texts(save_tiny(config, folder))


def test_the_doctor_checks_tokenizer_and_template_like_a_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def problem(*arguments: str) -> str:
        assert main(["doctor", *arguments]) == 1
        return capsys.readouterr().out.partition("! ")[2]

    few = mistral(tmp_path / "few", vocab_size=100)
    assert "the tokenizer has 2560 tokens, but the model only 100" in problem(str(few))
    folder = mistral(tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text("{% for each in messages %}{{ each.content[0].text }}{% endfor %}")
    said = problem(str(folder), "--chat-template", str(template))
    assert (
        "the model cannot be loaded: the chat template expects content as a list of parts" in said
    )
    (folder / "tokenizer.json").unlink()
    assert f"the model cannot be loaded: {folder} has no tokenizer.json" in problem(str(folder))


def test_the_doctor_reports_weights_that_would_be_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mistral(tmp_path / "model")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(1)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert main(["doctor", str(folder)]) == 1
    assert (
        "contain weights that the model would ignore: model.layers.0.mlp.up"
        in capsys.readouterr().out
    )


def test_the_doctor_reports_a_model_that_cannot_be_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mistral(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["doctor", str(folder)]) == 1
    told = capsys.readouterr().out
    assert "! the model cannot be loaded: cannot serve" in told
    assert "sees at most 64 positions" in told
    assert main(["doctor", str(folder), "--context-max", "60"]) == 0
    assert f"{folder}, layers in " in capsys.readouterr().out


def test_the_doctor_says_how_many_conversations_fit_on_the_disk(tmp_path: Path) -> None:
    told = pensieve("doctor", "--json", PENSIEVE_DATA=str(tmp_path / "made" / "later"))
    room = json.loads(told.stdout)["findings"]["disk"]
    found = re.match(r"([\d.]+) GiB free, room for about ([\d,]+) conversations", room)
    assert found is not None
    free, count = float(found[1]) * 2**30, int(found[2].replace(",", ""))
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1, abs=2**27)
    assert count == pytest.approx(free / 45_000, rel=0.15)
