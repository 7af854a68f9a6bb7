"""Limits of a tenant, with a fake clock, and the token file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.api.grpc.interceptor import authorization_of, kind_of
from pensieve.cli.main import main
from pensieve.errors import ConfigError, NotFound, PermissionDenied, QueueFull, Unauthenticated
from pensieve.guard import callers
from pensieve.guard.callers import Access, KnownTokens
from pensieve.guard.limits import LIMIT_NAMES, Allowance, Limits

BEARER = "authorization"


def test_a_tenant_may_run_at_most_turns_max_turns_at_once() -> None:
    allowance = Allowance(Limits(turns_max=2), 0.0)
    assert allowance.exceeded(1, 0.0) is None
    assert "2 turns at once" in str(allowance.exceeded(2, 0.0))


def test_tokens_of_ten_seconds_are_saved_up_and_a_debt_must_be_waited_for() -> None:
    allowance = Allowance(Limits(tokens_per_second=5.0), 100.0)
    allowance.spend(70, 100.0)  # 50 tokens had been saved up
    exceeded = allowance.exceeded(0, 100.0)
    assert exceeded is not None
    assert exceeded.retry_after_seconds == 4.0
    assert allowance.exceeded(0, 104.0) is None
    allowance.spend(0, 1000.0)
    allowance.spend(50, 1000.0)  # at most 50 tokens are saved up
    assert allowance.exceeded(0, 1000.0) is None
    allowance.spend(1, 1000.0)
    assert allowance.exceeded(0, 1000.0) is not None


def test_refusals_of_a_tenant_over_its_limits_are_rate_limited_after_a_burst() -> None:
    allowance = Allowance(Limits(turns_max=1, tokens_per_second=5.0), 0.0)
    full, missing = allowance.exceeded(1, 0.0), NotFound("conversation c does not exist")
    assert full is not None
    assert [allowance.seconds_to_refuse(full, 0.0) for _ in range(100)] == [0.0] * 100
    later = [allowance.seconds_to_refuse(full, 0.0) for _ in range(12)]
    assert later == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0])
    # Answers within the limits come at once, errors included. So does the answer of a full daemon.
    assert allowance.seconds_to_refuse(missing, 0.0) == 0.0
    assert allowance.seconds_to_refuse(QueueFull("too many turns are waiting"), 0.0) == 0.0
    allowance.spend(60, 0.0)
    assert allowance.seconds_to_refuse(missing, 0.0) == 1.0
    assert allowance.seconds_to_refuse(missing, 0.5) == pytest.approx(0.5)
    assert allowance.seconds_to_refuse(full, 100.0) == 0.0


def test_calls_of_a_tenant_in_debt_are_rate_limited_after_a_burst() -> None:
    allowance = Allowance(Limits(tokens_per_second=1.0), 0.0)
    assert [allowance.seconds_to_begin(0.0) for _ in range(2000)] == [0.0] * 2000
    allowance.spend(1000, 0.0)
    assert [allowance.seconds_to_begin(0.0) for _ in range(500)] == [0.0] * 500
    later = [allowance.seconds_to_begin(0.0) for _ in range(52)]
    assert later == pytest.approx([number / 50 for number in range(1, 51)] + [1.0, 1.0])
    assert allowance.seconds_to_begin(2.0) == 0.0


def tokens(tmp_path: Path, text: str) -> tuple[callers.Token, ...]:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    return callers.read_tokens(path)


def test_a_token_file_defines_tenants_limits_and_operators(tmp_path: Path) -> None:
    token, entry = callers.new_token("acme", admin=False, turns_max=3, tokens_per_second=20.0)
    other, second = callers.new_token("", admin=True)
    known = tokens(tmp_path, entry + second)
    assert callers.limits_of(known) == {"acme": Limits(3, 20.0), "": Limits()}
    guard = KnownTokens(known)
    send = kind_of("/pensieve.v1.ConversationService/SendMessage").access
    admin = kind_of("/pensieve.v1.AdminService/Drain").access
    check = kind_of("/grpc.health.v1.Health/Check").access
    assert guard.authenticate(send, f"Bearer {token}", "ipv4:1.2.3.4:5") == callers.Caller("acme")
    assert guard.authenticate(admin, f"Bearer {other}", "ipv4:1.2.3.4:5").admin
    assert guard.authenticate(admin, None, "unix:").admin
    assert guard.authenticate(check, None, "ipv4:1.2.3.4:5") == callers.Caller(known=False)
    # The caller matters here, because the call takes a slot of its tenant.
    assert guard.authenticate(check, f"Bearer {token}", "ipv4:1.2.3.4:5") == callers.Caller("acme")
    with pytest.raises(PermissionDenied):
        guard.authenticate(admin, f"Bearer {token}", "ipv4:1.2.3.4:5")
    for metadata in ([], [(BEARER, "Bearer x")], [(BEARER, token)], [(BEARER, b"\xff")]):
        for method in (
            *("/pensieve.v1.ConversationService/SendMessage", "/pensieve.v1.AdminService/Drain"),
            *("/grpc.reflection.v1alpha.ServerReflection/Info", "/other"),
        ):
            access, authorization = kind_of(method).access, authorization_of(metadata)
            with pytest.raises(Unauthenticated):
                guard.authenticate(access, authorization, "ipv4:1.2.3.4:5")


def test_without_tokens_local_callers_may_chat_but_not_administrate() -> None:
    guard = KnownTokens()
    assert guard.authenticate(Access.CALLER, None, "ipv4:127.0.0.1:5").tenant == ""
    with pytest.raises(PermissionDenied):
        guard.authenticate(Access.OPERATOR, None, "ipv4:127.0.0.1:5")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no token"),
        ("[[token]]\n", "is not 64 hexadecimal digits"),
        ('[[token]]\nsha256 = "' + "g" * 64 + '"\n', "is not 64 hexadecimal digits"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\ntenat = "a"\n', "unknown key 'tenat'"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\ntenant = "a/b"\n', "is not a valid id"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\nturns_max = 0\n', "turns_max"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\ntokens_per_second = "x"\n', "tokens_per_second"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\nrequests_per_second = nan\n', "positive number"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\nweight = inf\n', "weight of token 1"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\ncalls_max = 2.5\n', "positive whole number"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\nstorage_bytes = true\n', "storage_bytes"),
        ('[[token]]\nsha256 = "' + "0" * 64 + '"\npriority_max = 9\n', r"not in -8\.\.8"),
        ("token = 5\n", "must be a list of tables"),
        ("[[token\n", "is not valid TOML"),
    ],
)
def test_a_token_file_with_a_mistake_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        tokens(tmp_path, text)


def test_tokens_of_one_tenant_with_different_limits_are_refused(tmp_path: Path) -> None:
    one, other = (callers.new_token("a", admin=False, turns_max=each)[1] for each in (1, 2))
    with pytest.raises(ConfigError, match="the tokens of tenant 'a' have different limits"):
        callers.limits_of(tokens(tmp_path, one + other))


def test_the_token_command_has_a_flag_for_each_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "turns_max": "3",
        "tokens_per_second": "20.5",
        "requests_per_second": "4",
        "calls_max": "7",
        "storage_bytes": "10GiB",
        "unread_bytes": "1MiB",
        "weight": "2.5",
        "prefixes_max": "5",
        "priority_max": "-2",
    }
    assert flags.keys() == {*LIMIT_NAMES, "priority_max"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    assert main(["token", "--tenant", "acme", *words]) == 0
    (token,) = tokens(tmp_path, capsys.readouterr().out)
    assert token.tenant == "acme"
    assert token.priority_max == -2
    assert token.limits == Limits(
        turns_max=3,
        tokens_per_second=20.5,
        requests_per_second=4.0,
        calls_max=7,
        storage_bytes=10 << 30,
        unread_bytes=1 << 20,
        weight=2.5,
        prefixes_max=5,
    )
    with pytest.raises(SystemExit):
        main(["token", "--storage-bytes", "60%"])


def test_one_request_can_be_saved_up_even_at_a_very_low_rate() -> None:
    allowance = Allowance(Limits(requests_per_second=0.01), 0.0)
    assert allowance.count_request(0.0) is None
    refused = allowance.count_request(50.0)
    assert refused is not None
    assert refused.limit == "requests_per_second"
    assert refused.retry_after_seconds == 50.0
    assert allowance.count_request(100.0) is None
