"""The gRPC layer. Owns bytes on a socket and nothing behind them: the rest is `service.core_api.Inference` to it.

Reading order: `inference`, `snapshots`, `server_info` (the RPCs), `mapping_in` and `mapping_out` (messages and values),
`status` (errors and codes), `interceptor` (where the two meet a call), `health`, `reflection`, `server` (life).
"""
