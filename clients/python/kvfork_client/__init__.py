"""kvfork's client: generate, fork and roll back over gRPC, with typed results and errors.

    from kvfork_client import Client, Message, Mark

    with Client("127.0.0.1:50071") as client:
        with client.generate([Message.user("Hello")], save=True, marks=[Mark.prompt_end()]) as generation:
            for delta in generation:
                print(delta.text, end="")
        again = generation.marks[0].fork(2)

`AsyncClient` has the same methods, awaited. Reading order: messages (what to say), values (what comes back), errors,
then blocking or asynchronous (snapshots and generations), client or aio_client.
"""

from .aio_client import AsyncClient
from .asynchronous import AsyncGeneration, AsyncSnapshot
from .blocking import Generation, Snapshot
from .client import Client
from .endpoint import Tls
from .errors import *  # noqa: F403 - the tree is drawn there; `errors.__all__` names it
from .errors import __all__ as _error_names
from .generating import GenerateOptions
from .handles import ForkResult
from .messages import (
    ChatInput,
    Constraint,
    Durability,
    Image,
    InputLike,
    Landmark,
    Mark,
    Message,
    RawInput,
    Release,
    Role,
    Rounding,
    Sampling,
    SaveOptions,
    Schema,
    SchemaModel,
    SnapshotRef,
    Stopping,
    Tokens,
    chat,
    choice,
    json_schema,
    raw,
    regex,
    tokens,
)
from .values import (
    Admission,
    CacheStats,
    Changed,
    Channel,
    Delta,
    Extended,
    Finished,
    FinishReason,
    GenerationResult,
    Gone,
    GoneReason,
    HealthStatus,
    Limits,
    Marked,
    MissReason,
    ModelInfo,
    ModelState,
    Phase,
    Plan,
    Progress,
    Residency,
    Row,
    SamplingDefaults,
    ServerInfo,
    SnapshotInfo,
    Started,
    Synced,
    Timing,
    TokenCount,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from .watching import AsyncWatch, Watch

__all__ = [
    "Admission",
    "AsyncClient",
    "AsyncGeneration",
    "AsyncSnapshot",
    "AsyncWatch",
    "CacheStats",
    "Changed",
    "Channel",
    "ChatInput",
    "Client",
    "Constraint",
    "Delta",
    "Durability",
    "Extended",
    "FinishReason",
    "Finished",
    "ForkResult",
    "GenerateOptions",
    "Generation",
    "GenerationResult",
    "Gone",
    "GoneReason",
    "HealthStatus",
    "Image",
    "InputLike",
    "Landmark",
    "Limits",
    "Mark",
    "Marked",
    "Message",
    "MissReason",
    "ModelInfo",
    "ModelState",
    "Phase",
    "Plan",
    "Progress",
    "RawInput",
    "Release",
    "Residency",
    "Role",
    "Rounding",
    "Row",
    "Sampling",
    "SamplingDefaults",
    "SaveOptions",
    "Schema",
    "SchemaModel",
    "ServerInfo",
    "Snapshot",
    "SnapshotInfo",
    "SnapshotRef",
    "Started",
    "Stopping",
    "Synced",
    "Timing",
    "Tls",
    "TokenCount",
    "TokenLogprob",
    "Tokens",
    "TopLogprob",
    "Usage",
    "Watch",
    "chat",
    "choice",
    "json_schema",
    "raw",
    "regex",
    "tokens",
]
__all__ += _error_names
