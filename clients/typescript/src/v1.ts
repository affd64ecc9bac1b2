/** The messages of the contract, kvfork.v1. */
export * from "./gen/kvfork/v1/types_pb.js";
export * from "./gen/kvfork/v1/inference_service_pb.js";
export * from "./gen/kvfork/v1/snapshot_service_pb.js";
export * from "./gen/kvfork/v1/server_service_pb.js";
