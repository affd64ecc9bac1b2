"""How tokens are picked, when they end and what is told of them: messages into values. Total and pure.

Bounds are wider than any sane use and narrow enough that no arithmetic on logits overflows.
"""

from __future__ import annotations

from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import types_pb2 as pb

from service.request import Constraint, Form, Output, Sampling, Stopping
from service.rpc.fields import MAX_TOKEN_ID, Fields, quoted
from service.rpc.mapping_input import read_token_ids

MAX_LOGIT_BIAS = 1024  # entries
MAX_STOPS = 32
MAX_STOP_BYTES = 1024  # text is held back while it could still become a stop string
MAX_STOP_IDS = 256
MAX_TOP_LOGPROBS = 20  # the contract's
MAX_CONSTRAINT_BYTES = 64 << 10  # the contract's: what can be compiled in some tenths of a second
MAX_CHOICES = 256
MAX_CHOICE_BYTES = 1024


def read_sampling(message: pb.Sampling, path: str, fields: Fields) -> Sampling:
    """Unset knobs stay None: the model's defaults fill them later."""

    def number(
        name: str, low: float, high: float, *, above_low: bool = False, below_high: bool = False
    ) -> float | None:
        if not message.HasField(name):
            return None
        value: float = getattr(message, name)
        return fields.number(f"{path}.{name}", value, low, high, above_low=above_low, below_high=below_high)

    if len(message.logit_bias) > MAX_LOGIT_BIAS:
        fields.wrong(f"{path}.logit_bias", f"at most {MAX_LOGIT_BIAS} entries, are {len(message.logit_bias)}")
        bias: dict[int, float] = {}
    else:
        bias = dict(sorted(message.logit_bias.items()))  # a map has no order on the wire
    for token, value in bias.items():
        at = f"{path}.logit_bias[{token}]"
        fields.number(at, value, -100, 100)
        if token > MAX_TOKEN_ID:
            fields.wrong(at, f"token ids are at most {MAX_TOKEN_ID}")
    return Sampling(
        temperature=number("temperature", 0, 100),
        top_p=number("top_p", 0, 1, above_low=True),
        top_k=message.top_k if message.HasField("top_k") else None,
        min_p=number("min_p", 0, 1, below_high=True),
        repetition_penalty=number("repetition_penalty", 0.01, 100),
        frequency_penalty=number("frequency_penalty", -100, 100),
        presence_penalty=number("presence_penalty", -100, 100),
        logit_bias=tuple(bias.items()),
        seed=message.seed if message.HasField("seed") else None,
    )


def read_stopping(message: pb.Stopping, path: str, fields: Fields) -> Stopping:
    """An unset message is all defaults."""
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens == 0:
        fields.wrong(f"{path}.max_tokens", "must be at least 1; to compute a prompt alone, use CreateSnapshot")
    elif max_tokens is not None and message.min_tokens > max_tokens:
        fields.wrong(f"{path}.min_tokens", f"must be at most max_tokens ({max_tokens}), is {message.min_tokens}")
    if len(message.stop) > MAX_STOPS:
        fields.wrong(f"{path}.stop", f"at most {MAX_STOPS}, are {len(message.stop)}")
    for index, stop in enumerate(message.stop[:MAX_STOPS]):
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            fields.wrong(f"{path}.stop[{index}]", f"must have 1 to {MAX_STOP_BYTES} bytes, is {quoted(stop, 20)}")
    if len(message.stop_token_ids) > MAX_STOP_IDS:
        fields.wrong(f"{path}.stop_token_ids", f"at most {MAX_STOP_IDS}, are {len(message.stop_token_ids)}")
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(
            read_token_ids(message.stop_token_ids[:MAX_STOP_IDS], f"{path}.stop_token_ids", fields)
        ),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        time_limit=fields.duration(f"{path}.time_limit", message.time_limit)
        if message.HasField("time_limit")
        else None,
    )


def read_constraint(message: inference_pb.Constraint, fields: Fields) -> Constraint:
    """A form by its kind; whether it can be compiled is the core's to find out."""
    kind = message.WhichOneof("kind")
    if kind is None:
        fields.wrong("constraint", "one of json_schema, regex, lark and choice must be set")
        return Constraint(form=Form.REGEX)
    if kind == "choice":
        options = tuple(message.choice.options)
        if not 1 <= len(options) <= MAX_CHOICES:
            fields.wrong("constraint.choice.options", f"must be 1 to {MAX_CHOICES}, are {len(options)}")
        for index, option in enumerate(options[:MAX_CHOICES]):
            if not 1 <= len(option.encode()) <= MAX_CHOICE_BYTES:
                text = f"must have 1 to {MAX_CHOICE_BYTES} bytes, has {len(option.encode())}"
                fields.wrong(f"constraint.choice.options[{index}]", text)
        return Constraint(form=Form.CHOICE, options=options, after_reasoning=message.after_reasoning)
    text = getattr(message, kind)
    if not 1 <= len(text.encode()) <= MAX_CONSTRAINT_BYTES:
        fields.wrong(f"constraint.{kind}", f"must have 1 to {MAX_CONSTRAINT_BYTES} bytes, has {len(text.encode())}")
    return Constraint(form=Form(kind), text=text, after_reasoning=message.after_reasoning)


def read_output(message: inference_pb.OutputOptions, path: str, fields: Fields) -> Output:
    """An unset message is all defaults."""
    top = message.top_logprobs if message.HasField("top_logprobs") else None
    if top is not None and top > MAX_TOP_LOGPROBS:
        fields.wrong(f"{path}.top_logprobs", f"must be at most {MAX_TOP_LOGPROBS}, is {top}")
    return Output(
        token_ids=message.token_ids,
        top_logprobs=top,
        min_tokens_per_delta=max(1, message.min_tokens_per_delta),
        progress=message.progress,
    )
