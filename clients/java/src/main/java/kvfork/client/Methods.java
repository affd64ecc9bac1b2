// Made by clients/generate.py. Do not edit.
package kvfork.client;

import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.protobuf.ProtoUtils;
import com.google.protobuf.Message;

/** Every call of the contract, for {@link io.grpc.stub.ClientCalls}. */
final class Methods {
  static final MethodDescriptor<kvfork.v1.GenerateRequest, kvfork.v1.GenerateResponse> GENERATE =
      method("kvfork.v1.InferenceService", "Generate", MethodType.SERVER_STREAMING,
          kvfork.v1.GenerateRequest.getDefaultInstance(), kvfork.v1.GenerateResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.StopGenerationRequest, kvfork.v1.StopGenerationResponse> STOP_GENERATION =
      method("kvfork.v1.InferenceService", "StopGeneration", MethodType.UNARY,
          kvfork.v1.StopGenerationRequest.getDefaultInstance(), kvfork.v1.StopGenerationResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.CreateSnapshotRequest, kvfork.v1.CreateSnapshotResponse> CREATE_SNAPSHOT =
      method("kvfork.v1.InferenceService", "CreateSnapshot", MethodType.UNARY,
          kvfork.v1.CreateSnapshotRequest.getDefaultInstance(), kvfork.v1.CreateSnapshotResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.ForkRequest, kvfork.v1.ForkResponse> FORK =
      method("kvfork.v1.InferenceService", "Fork", MethodType.UNARY,
          kvfork.v1.ForkRequest.getDefaultInstance(), kvfork.v1.ForkResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.RollbackRequest, kvfork.v1.RollbackResponse> ROLLBACK =
      method("kvfork.v1.InferenceService", "Rollback", MethodType.UNARY,
          kvfork.v1.RollbackRequest.getDefaultInstance(), kvfork.v1.RollbackResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.CountTokensRequest, kvfork.v1.CountTokensResponse> COUNT_TOKENS =
      method("kvfork.v1.InferenceService", "CountTokens", MethodType.UNARY,
          kvfork.v1.CountTokensRequest.getDefaultInstance(), kvfork.v1.CountTokensResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.GetSnapshotRequest, kvfork.v1.GetSnapshotResponse> GET_SNAPSHOT =
      method("kvfork.v1.SnapshotService", "GetSnapshot", MethodType.UNARY,
          kvfork.v1.GetSnapshotRequest.getDefaultInstance(), kvfork.v1.GetSnapshotResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.ListSnapshotsRequest, kvfork.v1.ListSnapshotsResponse> LIST_SNAPSHOTS =
      method("kvfork.v1.SnapshotService", "ListSnapshots", MethodType.UNARY,
          kvfork.v1.ListSnapshotsRequest.getDefaultInstance(), kvfork.v1.ListSnapshotsResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.UpdateSnapshotRequest, kvfork.v1.UpdateSnapshotResponse> UPDATE_SNAPSHOT =
      method("kvfork.v1.SnapshotService", "UpdateSnapshot", MethodType.UNARY,
          kvfork.v1.UpdateSnapshotRequest.getDefaultInstance(), kvfork.v1.UpdateSnapshotResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.ExtendSnapshotsRequest, kvfork.v1.ExtendSnapshotsResponse> EXTEND_SNAPSHOTS =
      method("kvfork.v1.SnapshotService", "ExtendSnapshots", MethodType.UNARY,
          kvfork.v1.ExtendSnapshotsRequest.getDefaultInstance(), kvfork.v1.ExtendSnapshotsResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.DeleteSnapshotRequest, kvfork.v1.DeleteSnapshotResponse> DELETE_SNAPSHOT =
      method("kvfork.v1.SnapshotService", "DeleteSnapshot", MethodType.UNARY,
          kvfork.v1.DeleteSnapshotRequest.getDefaultInstance(), kvfork.v1.DeleteSnapshotResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.WatchSnapshotsRequest, kvfork.v1.WatchSnapshotsResponse> WATCH_SNAPSHOTS =
      method("kvfork.v1.SnapshotService", "WatchSnapshots", MethodType.SERVER_STREAMING,
          kvfork.v1.WatchSnapshotsRequest.getDefaultInstance(), kvfork.v1.WatchSnapshotsResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.ExportSnapshotRequest, kvfork.v1.ExportSnapshotResponse> EXPORT_SNAPSHOT =
      method("kvfork.v1.SnapshotService", "ExportSnapshot", MethodType.SERVER_STREAMING,
          kvfork.v1.ExportSnapshotRequest.getDefaultInstance(), kvfork.v1.ExportSnapshotResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.CheckImportRequest, kvfork.v1.CheckImportResponse> CHECK_IMPORT =
      method("kvfork.v1.SnapshotService", "CheckImport", MethodType.UNARY,
          kvfork.v1.CheckImportRequest.getDefaultInstance(), kvfork.v1.CheckImportResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.ImportSnapshotRequest, kvfork.v1.ImportSnapshotResponse> IMPORT_SNAPSHOT =
      method("kvfork.v1.SnapshotService", "ImportSnapshot", MethodType.CLIENT_STREAMING,
          kvfork.v1.ImportSnapshotRequest.getDefaultInstance(), kvfork.v1.ImportSnapshotResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.GetServerInfoRequest, kvfork.v1.GetServerInfoResponse> GET_SERVER_INFO =
      method("kvfork.v1.ServerService", "GetServerInfo", MethodType.UNARY,
          kvfork.v1.GetServerInfoRequest.getDefaultInstance(), kvfork.v1.GetServerInfoResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.ListModelsRequest, kvfork.v1.ListModelsResponse> LIST_MODELS =
      method("kvfork.v1.ServerService", "ListModels", MethodType.UNARY,
          kvfork.v1.ListModelsRequest.getDefaultInstance(), kvfork.v1.ListModelsResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.GetModelRequest, kvfork.v1.GetModelResponse> GET_MODEL =
      method("kvfork.v1.ServerService", "GetModel", MethodType.UNARY,
          kvfork.v1.GetModelRequest.getDefaultInstance(), kvfork.v1.GetModelResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.GetCacheStatsRequest, kvfork.v1.GetCacheStatsResponse> GET_CACHE_STATS =
      method("kvfork.v1.ServerService", "GetCacheStats", MethodType.UNARY,
          kvfork.v1.GetCacheStatsRequest.getDefaultInstance(), kvfork.v1.GetCacheStatsResponse.getDefaultInstance());
  static final MethodDescriptor<kvfork.v1.TrimCacheRequest, kvfork.v1.TrimCacheResponse> TRIM_CACHE =
      method("kvfork.v1.ServerService", "TrimCache", MethodType.UNARY,
          kvfork.v1.TrimCacheRequest.getDefaultInstance(), kvfork.v1.TrimCacheResponse.getDefaultInstance());

  private Methods() {}

  private static <Q extends Message, R extends Message> MethodDescriptor<Q, R> method(
      String service, String name, MethodType type, Q request, R response) {
    return MethodDescriptor.<Q, R>newBuilder()
        .setType(type)
        .setFullMethodName(MethodDescriptor.generateFullMethodName(service, name))
        .setSampledToLocalTracing(true)
        .setRequestMarshaller(ProtoUtils.marshaller(request))
        .setResponseMarshaller(ProtoUtils.marshaller(response))
        .build();
  }
}
