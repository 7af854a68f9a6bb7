"""Reflection for tools like grpcurl, without further packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pensieve.v1 import status_pb2
from tests.conversations.rig_daemon import DaemonRig, ServeProcess
from tests.guard.test_tenants import TokensRig

SERVICES = {
    "pensieve.v1.ConversationService",
    "pensieve.v1.JobService",
    "pensieve.v1.AdminService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}
Request = status_pb2.ServerReflectionRequest


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    with DaemonRig(tmp_path_factory.mktemp("daemon") / "data") as rig:
        yield rig


def ask(
    channel: grpc.Channel,
    *requests: Request,
    version: str = "v1",
    metadata: tuple[tuple[str, str], ...] = (),
) -> list[status_pb2.ServerReflectionResponse]:
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=Request.SerializeToString,
        response_deserializer=status_pb2.ServerReflectionResponse.FromString,
    )
    return list(call(iter(requests), timeout=60, metadata=metadata))


def files(
    answer: status_pb2.ServerReflectionResponse,
) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    found = map(
        descriptor_pb2.FileDescriptorProto.FromString,
        answer.file_descriptor_response.file_descriptor_proto,
    )
    return {file.name: file for file in found}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_all_services(tmp_path: Path, version: str) -> None:
    process = ServeProcess(tmp_path / "data")
    with grpc.insecure_channel(process.start()) as channel:
        (answer,) = ask(channel, Request(list_services=""), version=version)
    assert process.stop() == 0
    assert {each.name for each in answer.list_services_response.service} == SERVICES


def test_grpcio_reflection_client_finds_all_methods_and_types(rig: DaemonRig) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool

    database = ProtoReflectionDescriptorDatabase(rig.channel)
    pool = DescriptorPool(database)
    assert set(database.get_services()) == SERVICES
    for name in SERVICES:
        assert pool.FindServiceByName(name).methods
    send = pool.FindServiceByName("pensieve.v1.ConversationService").methods_by_name["SendMessage"]
    sampling = send.input_type.fields_by_name["sampling"].message_type
    assert sampling is not None
    assert sampling.fields_by_name["temperature"]
    check = pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]
    assert check.output_type.full_name == "grpc.health.v1.HealthCheckResponse"
    status = check.output_type.fields_by_name["status"].enum_type
    assert status is not None
    assert status.values_by_name["SERVING"].number == 1


def test_reflection_returns_a_file_with_its_imports_by_name_or_symbol(rig: DaemonRig) -> None:
    by_name, by_method, by_nested, health = ask(
        rig.channel,
        Request(file_by_filename="pensieve/v1/conversation.proto"),
        Request(file_containing_symbol="pensieve.v1.ConversationService.SendMessage"),
        Request(file_containing_symbol="grpc.health.v1.HealthCheckResponse.ServingStatus"),
        Request(file_containing_symbol="grpc.health.v1.Health"),
    )
    assert {"google/protobuf/struct.proto", "google/protobuf/timestamp.proto"} < set(files(by_name))
    assert list(files(by_name))[-1] == "pensieve/v1/conversation.proto"
    assert files(by_method) == files(by_name)
    assert list(files(by_nested)) == list(files(health)) == ["grpc/health/v1/health.proto"]


def test_unknown_names_get_an_error_answer_and_the_stream_continues(rig: DaemonRig) -> None:
    answers = ask(
        rig.channel,
        Request(host="here", file_by_filename="no.proto"),
        Request(file_containing_symbol="no.such.Thing"),
        Request(file_containing_symbol=""),
        Request(all_extension_numbers_of_type="no.such.Thing"),
        Request(all_extension_numbers_of_type="pensieve.v1.Usage"),
        Request(
            file_containing_extension=status_pb2.ExtensionRequest(
                containing_type="pensieve.v1.Usage", extension_number=7
            )
        ),
        Request(),
        Request(list_services="*"),
    )
    not_found, invalid = (
        grpc.StatusCode.NOT_FOUND.value[0],
        grpc.StatusCode.INVALID_ARGUMENT.value[0],
    )
    codes = [each.error_response.error_code for each in answers]
    assert codes == [not_found, not_found, not_found, not_found, 0, not_found, invalid, 0]
    assert answers[0].valid_host == answers[0].original_request.host == "here"
    assert answers[4].all_extension_numbers_response.base_type_name == "pensieve.v1.Usage"
    assert answers[7].list_services_response.service


def test_reflection_requires_a_token_if_calls_do(tmp_path: Path) -> None:
    with (
        TokensRig(tmp_path, {"ada": {}}) as rig,
        grpc.insecure_channel(rig.server.address) as channel,
    ):
        with pytest.raises(grpc.RpcError) as error:
            ask(channel, Request(list_services=""))
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {rig.secrets['ada']}"),)
        assert ask(channel, Request(list_services=""), metadata=metadata)
