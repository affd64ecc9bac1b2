"""Server reflection, v1 and v1alpha. Owns what is told: exactly the services that are registered.

grpcio-reflection serves v1alpha alone. The two versions differ in nothing but the package name, so the same servicer is
registered under both, and v1's descriptor is derived from v1alpha's for those who describe the reflection service too.
Details of errors decode in clients that ask here, because `status` imports google.rpc.error_details.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha import reflection_pb2_grpc as pb_grpc

V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, services: tuple[str, ...]) -> None:
    """Registers both versions; `services` are the full names of all other services."""
    _describe_v1()
    servicer = _Servicer((*services, V1ALPHA, V1))
    pb_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=pb.ServerReflectionRequest.FromString,
        response_serializer=pb.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler}),))


class _Servicer(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # the base is untyped
    """Also finds methods by their names, which the protocol asks for and the pool's look-up of symbols leaves out."""

    async def ServerReflectionInfo(
        self, request_iterator: AsyncIterator[pb.ServerReflectionRequest], context: object
    ) -> AsyncIterator[pb.ServerReflectionResponse]:
        """Answers one question after the other."""
        questions = (_by_service(request) async for request in request_iterator)
        async for response in super().ServerReflectionInfo(questions, context):
            yield response


def _by_service(request: pb.ServerReflectionRequest) -> pb.ServerReflectionRequest:
    try:
        method = descriptor_pool.Default().FindMethodByName(request.file_containing_symbol)
    except KeyError:
        return request
    return pb.ServerReflectionRequest(host=request.host, file_containing_symbol=method.containing_service.full_name)


def _describe_v1() -> None:
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        pass
    else:
        return  # there already: a second server in this process, or a library that brings v1
    proto = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(proto)
    proto.name, proto.package = "grpc/reflection/v1/reflection.proto", "grpc.reflection.v1"
    old, new = ".grpc.reflection.v1alpha.", ".grpc.reflection.v1."
    for message in proto.message_type:
        for field in message.field:
            if field.type_name:  # set at all only for messages and enums
                field.type_name = field.type_name.replace(old, new)
    for method in proto.service[0].method:
        method.input_type = method.input_type.replace(old, new)
        method.output_type = method.output_type.replace(old, new)
    pool.AddSerializedFile(proto.SerializeToString())
