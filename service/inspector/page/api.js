// Calls of the contract. Owns the token, which lives in this tab's sessionStorage and goes along as a header alone.

const KEY = "kvfork-token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

// What a call was refused with: code, reason, text and facts as any client of the contract gets them.
export class Refused extends Error {
  constructor(told) {
    super(told.text);
    Object.assign(this, told);
  }
  toString() {
    return `${this.reason || this.code}: ${this.text}`;
  }
}

async function post(name, message, signal) {
  const headers = { "content-type": "application/json" };
  if (token.get()) headers.authorization = `Bearer ${token.get()}`;
  const options = { method: "POST", headers, body: JSON.stringify(message), signal, credentials: "omit", cache: "no-store" };
  const reply = await fetch(`/api/${name}`, options);
  if (reply.ok) return reply;
  const text = await reply.text();
  let told;
  try {
    told = JSON.parse(text).error;
  } catch {
    told = { code: `HTTP ${reply.status}`, reason: "", text: text.trim(), facts: {} };
  }
  throw new Refused(told);
}

// One reply.
export async function call(name, message = {}, signal = undefined) {
  return (await post(name, message, signal)).json();
}

// Every message of a stream. Leaving the loop, or `signal`, ends the call.
export async function* stream(name, message, signal) {
  const reply = await post(name, message, signal);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        if (rest) throw new Refused({ code: "UNAVAILABLE", reason: "", text: "the stream broke off", facts: {} });
        return;
      }
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const told = JSON.parse(line);
        if (told.error) throw new Refused(told.error);
        yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
