"""Ray Serve and KubeRay accept the configurations in docs/cluster."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
schema = pytest.importorskip("ray.serve.schema")

from pensieve.cli.main import parser  # noqa: E402
from pensieve.cluster.deployments import shutdown_seconds  # noqa: E402
from pensieve.cluster.serve_config import (  # noqa: E402
    check_options,
    checked,
    local,
    with_generation_of,
    with_next_generation,
)
from pensieve.cluster.settings import replica_command, settings_of, store_environment  # noqa: E402
from pensieve.cluster.slots import Slot  # noqa: E402
from pensieve.config import resolve  # noqa: E402
from pensieve.errors import ConfigError  # noqa: E402
from pensieve.launch.daemon import setup_to_serve  # noqa: E402
from tests.cluster.ray_service import problems_of  # noqa: E402

FOLDER = Path(__file__).parent.parent.parent / "docs" / "cluster"


def serve_yaml() -> Any:
    return yaml.safe_load((FOLDER / "serve.yaml").read_text())


def manifests() -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text()))


def test_ray_serve_accepts_the_configuration() -> None:
    config = checked(serve_yaml(), "serve.yaml")
    assert config.grpc_options.port == 50051
    assert settings_of(config.applications[0].args).replicas == 2
    assert config.applications[0].deployments[0].max_replicas_per_node == 1


def test_the_manifest_deploys_the_same_configuration() -> None:
    service = manifests()[0]
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == serve_yaml()


def token_file(folder: Path) -> Path:
    path = folder / "tokens.toml"
    path.write_text(f'[[token]]\nname = "ada"\nsha256 = "{"0" * 64}"\ntenant = "ada"\n')
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("host", ["10.0.0.5", "127.0.0.1"])
def test_the_daemon_accepts_the_command_line_of_a_replica(tmp_path: Path, host: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    secret.chmod(0o600)
    for found in (serve_yaml(), yaml.safe_load(manifests()[0]["spec"]["serveConfigV2"])):
        args = found["applications"][0]["args"]
        args["serve"]["token_file"] = str(token_file(tmp_path))
        args["serve"]["cluster_secret"] = str(secret)
        settings = settings_of(args)
        command = replica_command(settings, "ada", host, Slot(0, tmp_path, -1))
        arguments = parser().parse_args(command[3:])
        flags = {each.name: getattr(arguments, each.name) for each in arguments.table}
        resolved = resolve(flags, store_environment(settings), None, arguments.table)
        setup = setup_to_serve(resolved)
        assert resolved.settings.store == settings.store
        assert setup.listening.address == setup.listening.http == f"{host}:0"
        assert len(setup.listening.tokens) == 1


def test_kuberay_accepts_the_manifest() -> None:
    assert problems_of(manifests()[0]) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("spec.rayClusterConfig.rayVersion", 2.6, "spec.rayClusterConfig.rayVersion: not a string"),
        (
            "spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus",
            0,
            "spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus: not a string",
        ),
        ("spec.serveConfig", {}, "spec.serveConfig: unknown"),
        ("spec.serveConfigV2", {}, "spec.serveConfigV2: not a string"),
        ("kind", "RayCluster", "kind: not 'RayService'"),
    ],
)
def test_a_mistake_in_a_manifest_is_found(path: str, value: Any, problem: str) -> None:
    manifest = copy.deepcopy(manifests()[0])
    *parents, last = path.split(".")
    at = manifest
    for name in parents:
        at = at[name]
    at[last] = value
    assert problem in problems_of(manifest)


def test_workers_have_the_resources_of_a_replica_and_time_to_drain() -> None:
    cluster = manifests()[0]["spec"]["rayClusterConfig"]
    args = serve_yaml()["applications"][0]["args"]
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    requests = pod["containers"][0]["resources"]["requests"]
    assert int(requests["nvidia.com/gpu"]) == args["gpus"]
    assert int(requests["cpu"]) >= args["cpus"]
    assert shutdown_seconds(settings_of(args)) == 102.0 > args["serve"]["drain_timeout"]
    assert pod["terminationGracePeriodSeconds"] > shutdown_seconds(settings_of(args))
    assert cluster["authOptions"] == {"mode": "token"}
    for spec in (cluster["headGroupSpec"]["template"]["spec"], pod):
        names = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
        assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in names


def test_all_nodes_can_log_in_to_the_database() -> None:
    service, _ = manifests()
    cluster = service["spec"]["rayClusterConfig"]
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    (container,) = pod["containers"]
    assert "PGPASSWORD" in {each["name"] for each in container["env"]}
    mounts = [each["mountPath"] for each in container["volumeMounts"]]
    assert serve_yaml()["applications"][0]["args"]["data"] in mounts


def test_the_daemon_accepts_the_file_mode_of_the_manifests_secrets() -> None:
    """The files belong to root, and the pod's group can read them."""
    cluster = manifests()[0]["spec"]["rayClusterConfig"]
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    (tokens,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert tokens["defaultMode"] == 0o440
    assert pod["securityContext"] == {"fsGroup": 1000}


def test_ray_accepts_the_configuration_of_a_local_cluster(tmp_path: Path) -> None:
    config = checked(local(2, tmp_path, 50051, 8000, {"model": ""}), "--local")
    settings = settings_of(config.applications[0].args)
    assert settings.local
    assert settings.serve["device_cache"] == "12%"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "serve.yaml is not a Ray Serve configuration"),
        ({"applications": []}, "serve.yaml: needs one application, with import_path"),
        ({"aplications": []}, "serve.yaml: applications: Field required"),
    ],
)
def test_an_invalid_configuration_is_refused_with_a_clear_error(found: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(found, "serve.yaml")


def test_a_configuration_without_pensieves_grpc_services_is_refused() -> None:
    found = serve_yaml()
    found["grpc_options"] = {"port": 50051}
    with pytest.raises(ConfigError, match="grpc_servicer_functions needs pensieve"):
        checked(found, "serve.yaml")


def test_a_roll_replaces_the_replicas_and_changes_nothing_else() -> None:
    application = serve_yaml()["applications"][0]
    once = with_next_generation(application)
    twice = with_next_generation(once)
    variables = [
        each["deployments"][0]["ray_actor_options"]["runtime_env"]["env_vars"]
        for each in (once, twice)
    ]
    assert variables == [{"PENSIEVE_GENERATION": "1"}, {"PENSIEVE_GENERATION": "2"}]
    assert {**twice, "deployments": 0} == {**application, "deployments": 0}
    assert "ray_actor_options" not in application["deployments"][0]


def test_deploying_the_unchanged_file_after_a_roll_replaces_no_replica() -> None:
    config = checked(serve_yaml(), "serve.yaml")
    rolled = with_next_generation(with_next_generation(serve_yaml()["applications"][0]))
    again = with_generation_of(rolled, config)
    assert again.model_dump(exclude_unset=True)["applications"] == [rolled]
    assert with_generation_of(serve_yaml()["applications"][0], config) == config
    assert with_generation_of(None, config) == config


def running(**changed: Any) -> dict[str, Any]:
    """Return Ray's status report for a Serve that was started with serve.yaml."""
    details = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000, "keep_alive_timeout_s": 77},
        "grpc_options": {
            "port": 50051,
            "grpc_servicer_functions": ["pensieve.cluster.grpc_edge:add_services"],
        },
    }
    return {**details, **changed}


def test_options_that_differ_from_the_running_proxies_are_refused() -> None:
    config = checked(serve_yaml(), "serve.yaml")
    check_options(config, running())
    for changed, named in (
        ({"proxy_location": "HeadOnly"}, "proxy_location: Ray Serve is running with other values"),
        (
            {"http_options": {"host": "127.0.0.1", "port": 80}},
            "http_options.host, http_options.port:",
        ),
        ({"grpc_options": {"port": 50052}}, "grpc_options.port: .* `pensieve cluster down` first"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_options(config, running(**changed))
    found = serve_yaml()
    del found["grpc_options"]["port"]
    with pytest.raises(ConfigError, match=r"grpc_options.port: "):  # Ray's default port is 9000
        check_options(checked(found, "serve.yaml"), running())
