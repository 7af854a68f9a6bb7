"""Where a setting comes from, and what is said when it is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.config import (
    REACHING,
    REMOVED,
    SERVING,
    SETTINGS,
    TABLES,
    TALKING,
    Setting,
    TierSize,
    print_settings,
    resolve,
    shown_store,
    without_secrets,
)
from pensieve.core.policies.registry import DEFAULT, POLICIES
from pensieve.errors import ConfigError

SERVE = (SERVING, SETTINGS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One file for every command."""
    path = tmp_path / "pensieve.toml"
    path.write_text(
        'address = "[::1]:7000"\n'
        "grace = 0.5\n"
        "turns_max = 9\n"
        "insecure = true\n"
        'device_cache = "2GiB"\n'
        'daemon = "unix:/run/p.sock"\n'
        "temperature = 0\n"
    )
    return path


def test_a_flag_beats_the_environment_the_environment_the_file_and_the_file_the_default(
    file: Path,
) -> None:
    environ = {"PENSIEVE_GRACE": "2", "PENSIEVE_TURNS_MAX": "8"}
    resolved = resolve({"turns_max": "7"}, environ, file, SERVE)
    names = ("turns_max", "grace", "address", "drain_timeout")
    assert [resolved.values[name] for name in names] == [7, 2.0, "[::1]:7000", 30.0]
    sources = [resolved.sources[name] for name in names]
    assert sources == ["flag", "PENSIEVE_GRACE", str(file), "default"]


def test_a_file_may_hold_what_other_commands_need(file: Path) -> None:
    serve = resolve({}, {}, file, SERVE)
    assert serve.values["insecure"] is True
    assert serve.settings.device_cache == TierSize(2 * 2**30, "bytes")
    assert "daemon" not in serve.values
    talk = resolve({}, {}, file, (REACHING, TALKING, SETTINGS))
    assert (talk.values["daemon"], talk.values["temperature"]) == ("unix:/run/p.sock", 0.0)
    assert "address" not in talk.values


def test_only_the_engines_settings_travel_to_it(file: Path) -> None:
    written = resolve({}, {}, file, SERVE).written
    assert written["turns_max"] == "9"
    assert not {"address", "grace", "insecure"} & set(written)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('adress = "a"', "there is no setting 'adress'; 'address' is one"),
        ("[serve]\ngrace = 1", "there is no setting 'serve'"),
        ("grace = [1]", "grace is a string, a number, true or false"),
        ("grace = nan", r"grace \(.*\) is a number in 0..86400, not 'nan'"),
        ('insecure = "perhaps"', r"insecure \(.*\) is true or false, not 'perhaps'"),
        ("turns_max = 1.5", r"turns_max \(.*\) is a whole number in 0..65536, not '1.5'"),
        ("grace = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=problem):
        resolve({}, {}, path, SERVE)


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"grace \(PENSIEVE_GRACE\) is a number in 0..86400"):
        resolve({}, {"PENSIEVE_GRACE": "-1"}, None, SERVE)


def test_a_removed_setting_is_an_error_that_says_what_replaces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.toml"
    file.write_text("echo_seconds = 0.1\n")
    instead = "echo_seconds was removed: write --engine echo:SECONDS"
    with pytest.raises(ConfigError, match=instead):
        resolve({}, {}, file, SERVE)
    with pytest.raises(ConfigError, match="PENSIEVE_HEARTBEAT was removed: an engine"):
        resolve({}, {"PENSIEVE_HEARTBEAT": "2"}, None, SERVE)
    assert main(["serve", "--echo-seconds", "0.1"]) == ConfigError.exit_code
    assert "--echo-seconds was removed: write --engine" in capsys.readouterr().err
    assert not REMOVED.keys() & {each.name for table in TABLES for each in table}


def test_print_config_says_where_values_come_from_and_keeps_secrets(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSIEVE_TOKEN", "hush")
    assert main(["chat", "--config", str(file), "--seed", "5", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# token is set and not shown  # PENSIEVE_TOKEN" in lines
    assert "seed = 5  # flag" in lines
    assert f'daemon = "unix:/run/p.sock"  # {file}' in lines
    assert "# temperature is not set  # default" not in lines
    assert "# top_p is not set  # default" in lines
    assert main(["serve", "--config", str(file), "--insecure", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "insecure = true  # flag" in lines
    assert f"grace = 0.5  # {file}" in lines
    assert main(["admin", "stats", "--config", str(file), "--print-config"]) == 0
    assert "# token is set and not shown  # PENSIEVE_TOKEN" in capsys.readouterr().out.splitlines()


def test_a_daemon_and_a_plan_have_the_same_policy_by_default() -> None:
    (setting,) = (each for table in TABLES for each in table if each.name == "policy")
    assert setting.default == DEFAULT
    assert set(POLICIES) == {"lru", "value", "return"}


ODD_TEXTS = (
    *("", "auto", "true", "no", "0", "7", "64", "0.1", "1e3", "1", "95", "cpu", "cuda:1", "int8"),
    *("6GiB", "6.7GB", "333t", "0.1%", "float32", "value", "native", "echo", "json"),
    *("~/there", 'a "b" \\c\td\x7f', "Grüße\n日本 \U0001f600", str(2**64 - 1), "127.0.0.1:7"),
)


@pytest.mark.parametrize("setting", [each for table in TABLES for each in table if not each.secret])
def test_what_print_config_prints_loads_as_the_same_settings(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each setting, with every text that it takes of a list."""
    num_taken, path = 0, tmp_path / "printed.toml"
    for text in ODD_TEXTS:
        try:
            given = resolve({setting.name: text}, {}, None, TABLES)
        except ConfigError:
            continue
        num_taken += 1
        print_settings(given)
        printed = capsys.readouterr().out
        tomllib.loads(printed)
        path.write_text(printed, encoding="utf-8")
        again = resolve({}, {}, path, TABLES)
        assert again.values == given.values, text
        assert again.written == given.written | again.written, text
    assert num_taken >= 2


def test_no_two_settings_share_a_name_or_a_flag_of_one_command() -> None:
    names = [setting.name for table in TABLES for setting in table]
    assert len(names) == len(set(names))
    for tables in (SERVE, (REACHING, TALKING, SETTINGS)):
        flags = [setting.flag for table in tables for setting in table]
        assert len(flags) == len(set(flags))


def test_the_name_of_a_daemon_among_several_fits_into_labels_and_lists() -> None:
    for name in ("a", "replica-1.eu~2_x", "A" * 128):
        assert resolve({"replica": name}, {}, None, SERVE).values["replica"] == name
    assert resolve({}, {}, None, SERVE).values["replica"] is None
    for name in ("a b", "a=b", "a,b", "a/b", "A" * 129, "ä", "a\n"):
        with pytest.raises(ConfigError, match="has 1 to 128 of the characters"):
            resolve({"replica": name}, {}, None, SERVE)


def test_where_a_history_is_may_be_shown() -> None:
    for url, shown in (
        ("", ""),
        ("postgresql://ada:secret@db.example:5433/chats?sslmode=require", "db.example:5433/chats"),
        ("postgres://ada@db.example/chats", "db.example/chats"),
        ("postgresql://a.example,b.example/chats", "a.example,b.example/chats"),
    ):
        assert shown_store(url) == (f"postgresql://{shown}" if shown else "")
    assert shown_store("history://10.0.0.9:7000") == "history://10.0.0.9:7000"


def test_a_process_that_is_to_know_no_secret_gets_none() -> None:
    given = {
        "PENSIEVE_STORE": "postgresql://me:hunter2@host/db",
        "PENSIEVE_TOKEN": "hunter2",
        "PGPASSWORD": "hunter2",
        "PGPASSFILE": "/run/secrets/pgpass",
        "PENSIEVE_MODEL": "smollm2",
        "PGHOST": "host",
        "PATH": "/bin",
    }
    assert without_secrets(given) == {
        "PENSIEVE_MODEL": "smollm2",
        "PGHOST": "host",
        "PATH": "/bin",
    }
