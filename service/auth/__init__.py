"""Who calls, and how they show it. Knows nothing of gRPC: `service.rpc.door` brings metadata and certificates here.

`callers` has the value that a call runs under, `tokens` the table of bearer tokens, `source` where the table comes
from, `authenticator` the decision.
"""
