/** What to say, as the contract's messages. */
import { clone, create, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";
import {
  InputSchema,
  Landmark,
  type Mark,
  MarkSchema,
  type Message,
  MessageSchema,
  type Part,
  PartSchema,
  Role,
  type Sampling,
  SamplingSchema,
  type Input,
} from "./gen/kvfork/v1/types_pb.js";

type PartLike = string | Part;

/** Raw text: no template. Where it opens a context it gets the tokenizer's own BOS. */
export function text(value: string): Input {
  return create(InputSchema, {
    form: { case: "raw", value: { parts: [part(value)], addSpecialTokens: true } },
  });
}

/** Parts as they are: text, token runs and images in reading order. */
export function raw(...parts: PartLike[]): Input {
  return create(InputSchema, { form: { case: "raw", value: { parts: parts.map(part) } } });
}

/** Turns for the model's own template. With a parent these are only the turns to append. */
export function chat(...messages: Message[]): Input {
  return create(InputSchema, { form: { case: "chat", value: { messages } } });
}

export const system = (...parts: PartLike[]) => turn(Role.SYSTEM, parts);
export const user = (...parts: PartLike[]) => turn(Role.USER, parts);
export const assistant = (...parts: PartLike[]) => turn(Role.ASSISTANT, parts);
export const tool = (...parts: PartLike[]) => turn(Role.TOOL, parts);

/** An encoded PNG, JPEG or WebP file. */
export function image(data: Uint8Array<ArrayBuffer>): Part {
  return create(PartSchema, { kind: { case: "image", value: { source: { case: "data", value: data } } } });
}

/** Token ids taken verbatim. */
export function tokens(...ids: number[]): Part {
  return create(PartSchema, { kind: { case: "tokens", value: { ids } } });
}

/** Always the likeliest token. */
export function greedy(): Sampling {
  return create(SamplingSchema, { temperature: 0 });
}

/** The end of the prompt, before the first new token. */
export function promptEnd(options?: Mark["options"]): Mark {
  return create(MarkSchema, { at: { case: "landmark", value: Landmark.PROMPT_END }, options });
}

/** A place in the context, the parent included. */
export function afterTokens(count: number, options?: Mark["options"]): Mark {
  return create(MarkSchema, { at: { case: "tokenCount", value: count }, options });
}

/** The end of a turn of the chat input. */
export function afterMessages(count: number, options?: Mark["options"]): Mark {
  return create(MarkSchema, { at: { case: "messageCount", value: count }, options });
}

/** The caller's message as a copy of our own. */
export function own<S extends DescMessage>(schema: S, init: MessageInitShape<S>): MessageShape<S> {
  return clone(schema, create(schema, init));
}

/** Takes the BOS from our copy of an input that goes on from a parent: in the middle of a context it is never right. */
export function continues(input: Input | undefined, parent: string): void {
  if (parent && input?.form.case === "raw") {
    input.form.value.addSpecialTokens = false;
  }
}

function part(value: PartLike): Part {
  return typeof value === "string" ? create(PartSchema, { kind: { case: "text", value } }) : value;
}

function turn(role: Role, parts: PartLike[]): Message {
  return create(MessageSchema, { role, parts: parts.map(part) });
}
