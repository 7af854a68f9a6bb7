"""The sources of settings, and the errors for wrong settings."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pensieve.cli.main import main
from pensieve.config import (
    ENGINE,
    REACH,
    REMOVED_SETTINGS,
    SERVE,
    TALK,
    Setting,
    TierSize,
    print_settings,
    resolve,
    settings_for,
    settings_named,
    shown_store,
    without_secrets,
)
from pensieve.config.settings import ALL, INTERNAL, POLICY_NAMES
from pensieve.core.policies.registry import DEFAULT, POLICIES
from pensieve.errors import ConfigError

SERVED = settings_for(SERVE, ENGINE)
TALKED = settings_for(REACH, TALK, ENGINE)
WITH_FLAGS = tuple(each for each in ALL if INTERNAL not in each.used_by)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """All commands can share one file."""
    path = tmp_path / "pensieve.toml"
    path.write_text(
        'address = "[::1]:7000"\n'
        "drain_timeout = 0.5\n"
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
    environ = {"PENSIEVE_DRAIN_TIMEOUT": "2", "PENSIEVE_TURNS_MAX": "8"}
    resolved = resolve({"turns_max": "7"}, environ, file, SERVED)
    names = ("turns_max", "drain_timeout", "address", "ttft")
    assert [getattr(resolved.settings, name) for name in names] == [7, 2.0, "[::1]:7000", 0.0]
    sources = [resolved.sources[name] for name in names]
    assert sources == ["flag", "PENSIEVE_DRAIN_TIMEOUT", str(file), "default"]


def test_a_file_may_have_settings_of_other_commands(file: Path) -> None:
    serve = resolve({}, {}, file, SERVED)
    assert serve.settings.insecure is True
    assert serve.settings.device_cache == TierSize(2 * 2**30, "bytes")
    assert "daemon" not in serve.sources
    talk = resolve({}, {}, file, TALKED)
    assert talk.settings.daemon == "unix:/run/p.sock"
    assert vars(talk.settings)["temperature"] == 0.0
    assert "address" not in talk.sources


def test_only_the_engines_settings_are_passed_to_the_engine(file: Path) -> None:
    written = resolve({}, {}, file, SERVED).written
    assert written["turns_max"] == "9"
    assert not {"address", "drain_timeout", "insecure"} & set(written)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('adress = "a"', "unknown setting 'adress'. Did you mean 'address'?"),
        ("[serve]\ndrain_timeout = 1", "unknown setting 'serve'"),
        ("drain_timeout = [1]", "drain_timeout must be a string, a number, true or false"),
        ("drain_timeout = nan", r"drain_timeout \(.*\) must be a number in 0..86400, not 'nan'"),
        ('insecure = "perhaps"', r"insecure \(.*\) must be true or false, not 'perhaps'"),
        ("turns_max = 1.5", r"turns_max \(.*\) must be a whole number in 0..65536, not '1.5'"),
        ("drain_timeout = ", "is not valid TOML"),
    ],
)
def test_the_error_names_an_invalid_file_and_the_problem(
    tmp_path: Path, line: str, problem: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=problem):
        resolve({}, {}, path, SERVED)


def test_the_error_names_an_invalid_variable() -> None:
    with pytest.raises(
        ConfigError, match=r"drain_timeout \(PENSIEVE_DRAIN_TIMEOUT\) must be a number in 0..86400"
    ):
        resolve({}, {"PENSIEVE_DRAIN_TIMEOUT": "-1"}, None, SERVED)


def test_a_removed_setting_is_an_error_that_says_what_replaces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.toml"
    file.write_text("grace = 0.1\n")
    instead = "grace was removed: a client can reattach"
    with pytest.raises(ConfigError, match=instead):
        resolve({}, {}, file, SERVED)
    with pytest.raises(ConfigError, match="PENSIEVE_HEARTBEAT was removed: an engine"):
        resolve({}, {"PENSIEVE_HEARTBEAT": "2"}, None, SERVED)
    assert main(["serve", "--grace", "0.1"]) == ConfigError.exit_code
    assert "--grace was removed: a client" in capsys.readouterr().err
    assert not REMOVED_SETTINGS.keys() & {each.name for each in WITH_FLAGS}


def test_print_config_shows_the_source_of_values_and_hides_secrets(
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
    assert f"drain_timeout = 0.5  # {file}" in lines
    assert main(["admin", "stats", "--config", str(file), "--print-config"]) == 0
    assert "# token is set and not shown  # PENSIEVE_TOKEN" in capsys.readouterr().out.splitlines()


def test_a_daemon_and_a_plan_have_the_same_policy_by_default() -> None:
    (setting,) = settings_named("policy")
    assert setting.default == DEFAULT
    assert set(POLICIES) == set(POLICY_NAMES)


ODD_TEXTS = (
    *("", "auto", "true", "no", "0", "7", "64", "0.1", "1e3", "1", "95", "cpu", "cuda:1", "int8"),
    *("6GiB", "6.7GB", "333t", "0.1%", "float32", "value", "native", "echo", "json"),
    *("~/there", 'a "b" \\c\td\x7f', "Grüße\n日本 \U0001f600", str(2**64 - 1), "127.0.0.1:7"),
)


@pytest.mark.parametrize("setting", [each for each in WITH_FLAGS if not each.secret])
def test_the_output_of_print_config_loads_as_the_same_settings(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print settings with --print-config, load the output, and compare."""
    num_taken, path = 0, tmp_path / "printed.toml"
    for text in ODD_TEXTS:
        try:
            given = resolve({setting.name: text}, {}, None, WITH_FLAGS)
        except ConfigError:
            continue
        num_taken += 1
        print_settings(given)
        printed = capsys.readouterr().out
        tomllib.loads(printed)
        path.write_text(printed, encoding="utf-8")
        again = resolve({}, {}, path, WITH_FLAGS)
        assert again.settings == given.settings, text
        assert again.written == given.written | again.written, text
    assert num_taken >= 2


@pytest.mark.parametrize("table", [SERVED, TALKED])
def test_no_two_settings_of_a_command_share_a_flag(table: tuple[Setting, ...]) -> None:
    flags = [setting.flag for setting in table]
    assert len(flags) == len(set(flags))


def test_help_is_short_and_help_all_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    helps = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main(["serve", flag])
        assert ended.value.code == 0
        helps.append(capsys.readouterr().out)
    short, whole = helps
    assert len(short.splitlines()) <= 100
    for setting in SERVED:
        named = "MODEL" if setting.name == "model" else f"\n  {setting.flag}"
        assert (named in short) == setting.common, named
        assert named in whole


def test_settings_for_tests_have_a_variable_but_no_flag_and_no_key(tmp_path: Path) -> None:
    assert resolve({}, {"PENSIEVE_CHUNK_TOKENS": "8"}).settings.chunk_tokens == 8
    file = tmp_path / "pensieve.toml"
    file.write_text("chunk_tokens = 8\n")
    with pytest.raises(ConfigError, match="chunk_tokens was removed"):
        resolve({}, {}, file)


def test_a_replica_name_has_only_characters_that_are_safe_in_labels_and_lists() -> None:
    for name in ("a", "replica-1.eu~2_x", "A" * 128):
        assert resolve({"replica": name}, {}, None, SERVED).settings.replica == name
    assert resolve({}, {}, None, SERVED).settings.replica is None
    for name in ("a b", "a=b", "a,b", "a/b", "A" * 129, "ä", "a\n"):
        with pytest.raises(ConfigError, match="must have 1 to 128 characters"):
            resolve({"replica": name}, {}, None, SERVED)


def test_the_shown_store_url_has_no_credentials() -> None:
    for url, shown in (
        ("", ""),
        ("postgresql://ada:secret@db.example:5433/chats?sslmode=require", "db.example:5433/chats"),
        ("postgres://ada@db.example/chats", "db.example/chats"),
        ("postgresql://a.example,b.example/chats", "a.example,b.example/chats"),
    ):
        assert shown_store(url) == (f"postgresql://{shown}" if shown else "")
    assert shown_store("sqlite:///var/lib/a@b.db") == "sqlite:///var/lib/a@b.db"


@pytest.mark.parametrize("url", ["sqlite:///var/lib/a.db", "sqlite:////var/lib/a.db"])
def test_a_sqlite_file_may_be_given_as_a_sqlalchemy_url(url: str) -> None:
    found = resolve({"store": url}, {}, None, SERVED)
    assert found.settings.store == "sqlite:///var/lib/a.db"


@pytest.mark.parametrize("url", ["history://10.0.0.9:50060", "historys://history.example:50060"])
def test_a_history_service_url_is_refused_and_the_error_names_the_replacement(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    instead = "--store sqlite:///FOLDER/conversations.db if all are on one host"
    with pytest.raises(ConfigError) as refused:
        resolve({"store": url}, {}, None, SERVED)
    assert instead in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        resolve({}, {"PENSIEVE_STORE": url}, None, SERVED)
    assert instead in str(refused.value)
    assert main(["serve", "--store", url]) == 3
    assert instead in capsys.readouterr().err
    assert main(["history", "--data", "/var/lib/pensieve", "--lease", "3"]) == 3
    assert instead in capsys.readouterr().err


def test_without_secrets_removes_all_secrets_from_the_environment() -> None:
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
