"""Reflection: both versions tell exactly what is registered, and everything that is told can be described."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2 as pb

from service.rpc.reflection import V1, V1ALPHA

from .conftest import Serving, run, serving

EXPECTED = {
    "kvfork.v1.InferenceService",
    "kvfork.v1.SnapshotService",
    "kvfork.v1.ServerService",
    "grpc.health.v1.Health",
    V1,
    V1ALPHA,
}


async def ask(s: Serving, version: str, *requests: pb.ServerReflectionRequest) -> list[pb.ServerReflectionResponse]:
    # The two versions' messages are the same on the wire.
    call = s.channel.stream_stream(
        f"/{version}/ServerReflectionInfo",
        request_serializer=pb.ServerReflectionRequest.SerializeToString,
        response_deserializer=pb.ServerReflectionResponse.FromString,
    )(iter(requests))
    return [response async for response in call]


def files(response: pb.ServerReflectionResponse) -> Sequence[descriptor_pb2.FileDescriptorProto]:
    assert response.HasField("file_descriptor_response"), response
    return [
        descriptor_pb2.FileDescriptorProto.FromString(proto)
        for proto in response.file_descriptor_response.file_descriptor_proto
    ]


@pytest.mark.parametrize("version", [V1, V1ALPHA])
def test_all_services_are_listed_and_each_can_be_described(version):
    async def story():
        async with serving() as s:
            [response] = await ask(s, version, pb.ServerReflectionRequest(list_services=""))
            names = {service.name for service in response.list_services_response.service}
            assert names == EXPECTED
            for name in sorted(names):
                symbol = pb.ServerReflectionRequest(file_containing_symbol=name)
                [described] = await ask(s, version, symbol)
                assert any(
                    f"{file.package}.{service.name}" == name for file in files(described) for service in file.service
                )

    run(story)


def test_the_descriptors_hold_what_a_client_needs_to_call_generate_and_read_errors():
    async def story():
        async with serving() as s:
            [generate, details] = await ask(
                s,
                V1,
                pb.ServerReflectionRequest(file_containing_symbol="kvfork.v1.InferenceService.Generate"),
                pb.ServerReflectionRequest(file_containing_symbol="google.rpc.BadRequest"),
            )
            assert {"kvfork/v1/inference_service.proto", "kvfork/v1/types.proto", "google/protobuf/duration.proto"} <= {
                file.name for file in files(generate)
            }
            assert {file.package for file in files(details)} >= {"google.rpc"}

    run(story)


def test_an_unknown_symbol_is_not_found_and_an_unknown_method_unimplemented():
    async def story():
        async with serving() as s:
            [response] = await ask(s, V1, pb.ServerReflectionRequest(file_containing_symbol="kvfork.v1.Nothing"))
            assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.channel.unary_unary("/kvfork.v1.InferenceService/Nothing")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(story)
