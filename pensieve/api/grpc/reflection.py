"""gRPC's server reflection: list services and describe their messages, for tools like grpcurl.

status.proto has a copy of the messages of reflection and health checks, so no other package is needed. The
protocol versions `v1` and `v1alpha` have the same messages.

A separate descriptor pool has our proto files, and files for health and reflection. The files for health and
reflection have the official names, and are made from the messages in status.proto.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from pensieve.v1 import admin_pb2, conversation_pb2
from pensieve.v1 import status_pb2 as pb

HEALTH = "grpc.health.v1.Health"
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
SERVICES = (
    "pensieve.v1.ConversationService",
    "pensieve.v1.AdminService",
    HEALTH,
    *REFLECTION,
)
METHOD = "ServerReflectionInfo"
OURS = pb.DESCRIPTOR.package


class ReflectedMethod(NamedTuple):
    request: Descriptor
    response: Descriptor
    takes_stream: bool = False
    gives_stream: bool = False


class Reflection:
    """Answers reflection requests."""

    def __init__(self, more: Sequence[ServiceDescriptor] = ()) -> None:
        """`more`: optional services of this server."""
        self._pool = DescriptorPool()
        self._services = (*SERVICES, *(each.full_name for each in more))
        ours = (conversation_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, *(each.file for each in more))
        for file in ours:
            for each in _with_imports(file):
                self._pool.AddSerializedFile(each.serialized_pb)
        check = (pb.HealthCheckRequest.DESCRIPTOR, pb.HealthCheckResponse.DESCRIPTOR)
        self._add(
            "grpc/health/v1/health.proto",
            HEALTH,
            {"Check": ReflectedMethod(*check), "Watch": ReflectedMethod(*check, gives_stream=True)},
        )
        talk = (pb.ServerReflectionRequest.DESCRIPTOR, pb.ServerReflectionResponse.DESCRIPTOR)
        for name in REFLECTION:
            folder = name.rpartition(".")[0].replace(".", "/")
            method = ReflectedMethod(*talk, takes_stream=True, gives_stream=True)
            self._add(f"{folder}/reflection.proto", name, {METHOD: method})

    def handlers(self) -> tuple[Any, ...]:
        method = grpc.stream_stream_rpc_method_handler(
            self._answers,
            request_deserializer=pb.ServerReflectionRequest.FromString,
            response_serializer=pb.ServerReflectionResponse.SerializeToString,
        )
        return tuple(
            grpc.method_handlers_generic_handler(name, {METHOD: method}) for name in REFLECTION
        )

    async def _answers(
        self, requests: AsyncIterator[pb.ServerReflectionRequest], context: Any
    ) -> AsyncIterator[pb.ServerReflectionResponse]:
        async for request in requests:
            yield self.answer(request)

    def answer(self, request: pb.ServerReflectionRequest) -> pb.ServerReflectionResponse:
        response = pb.ServerReflectionResponse(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        try:
            if kind == "list_services":
                for name in self._services:
                    response.list_services_response.service.add(name=name)
            elif kind == "file_by_filename":
                _put(response, self._pool.FindFileByName(request.file_by_filename))
            elif kind == "file_containing_symbol":
                _put(response, self._file_of(request.file_containing_symbol))
            elif kind == "all_extension_numbers_of_type":  # our messages have no extensions
                found = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                response.all_extension_numbers_response.base_type_name = found.full_name
            elif kind == "file_containing_extension":
                raise KeyError
            else:
                _refuse(response, grpc.StatusCode.INVALID_ARGUMENT, "the request has no query")
        except KeyError:
            _refuse(response, grpc.StatusCode.NOT_FOUND, "unknown file, symbol or type")
        return response

    def _file_of(self, symbol: str) -> FileDescriptor:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:  # the pool cannot look up methods
            return self._pool.FindMethodByName(symbol).containing_service.file

    def _add(self, file_name: str, service: str, methods: Mapping[str, ReflectedMethod]) -> None:
        """Add a service file whose messages are copied from status.proto into another package."""
        package, _, name = service.rpartition(".")
        file = descriptor_pb2.FileDescriptorProto(name=file_name, package=package, syntax="proto3")
        declared = file.service.add(name=name)
        for method_name, method in methods.items():
            declared.method.add(
                name=method_name,
                input_type=f".{package}.{method.request.name}",
                output_type=f".{package}.{method.response.name}",
                client_streaming=method.takes_stream,
                server_streaming=method.gives_stream,
            )
        kinds = (kind for method in methods.values() for kind in (method.request, method.response))
        for kind in _with_nested_types(kinds):
            message = file.message_type.add()
            kind.CopyToProto(message)
            for field in (field for field in message.field if field.type_name):
                field.type_name = field.type_name.replace(f".{OURS}.", f".{package}.")
            for value in (value for enum in message.enum_type for value in enum.value):
                # Our proto linter requires this prefix, but the official names do not have it.
                value.name = value.name.removeprefix("SERVING_STATUS_")
        self._pool.AddSerializedFile(file.SerializeToString())


def _with_nested_types(kinds: Iterable[Descriptor]) -> list[Descriptor]:
    """Return these message types and the message types of their fields, without repeats."""
    found: dict[str, Descriptor] = {}
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop(0)
        if kind.full_name not in found:
            found[kind.full_name] = kind
            waiting += [field.message_type for field in kind.fields if field.message_type]
    return list(found.values())


def _with_imports(file: FileDescriptor) -> Iterator[FileDescriptor]:
    """Yield the imports of a file, and then the file. A file may be yielded more than once."""
    for each in file.dependencies:
        yield from _with_imports(each)
    yield file


def _put(response: pb.ServerReflectionResponse, file: FileDescriptor) -> None:
    files = {each.name: each.serialized_pb for each in _with_imports(file)}
    response.file_descriptor_response.file_descriptor_proto.extend(files.values())


def _refuse(response: pb.ServerReflectionResponse, code: grpc.StatusCode, text: str) -> None:
    response.error_response.error_code = code.value[0]
    response.error_response.error_message = text
