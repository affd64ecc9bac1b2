/** Where a server is and how to talk to it, and when a call is made again. */
import { connect as connectSocket, isIP } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import { ConnectError, type Interceptor, type Transport } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { KvforkError, mayRepeat, pushback } from "./errors.js";

/** How to check the server and prove who the caller is, in PEM. Without `ca`: Node's own roots. */
export interface Tls {
  readonly ca?: string | Uint8Array;
  readonly certificate?: string | Uint8Array;
  readonly key?: string | Uint8Array;
  /** If it differs from the address's host. */
  readonly serverName?: string;
}

export interface ClientOptions {
  /** Sent as a bearer token. Off this machine it needs `tls`, or `tls: false` if the network is trusted. */
  readonly token?: string;
  /** By default plaintext. */
  readonly tls?: Tls | boolean;
  /** For calls that give none of their own. */
  readonly timeoutMs?: number;
  /** Repeat calls that found the server unavailable, up to 4 tries, before any reply began. On by default. */
  readonly retry?: boolean;
  readonly interceptors?: readonly Interceptor[];
}

const tries = 4;
const firstPauseMs = 200;
const longestPauseMs = 3000;
const maxMessageBytes = 64 * 2 ** 20; // token lists of long contexts are large

/** An address that never leaves the machine. */
function isLocal(address: string): boolean {
  if (address.startsWith("unix:")) {
    return true;
  }
  const host = address.replace(/:\d+$/, "").replace(/^\[|\]$/g, "");
  return host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

/** A transport to "host:port" or "unix:/path". */
export function transportTo(target: string, options: ClientOptions): Transport {
  const address = target.startsWith("/") ? `unix:${target}` : target;
  if (address === "" || /^https?:\/\//.test(address)) {
    throw new TypeError(`an address is host:port or unix:/path, not "${target}"`);
  }
  const { token, tls } = options;
  if (token && !tls && tls !== false && !isLocal(address)) {
    throw new TypeError(
      `refusing to send a token to ${address} without TLS; give tls, or tls: false if the network is trusted`,
    );
  }
  const authorize: Interceptor = (next) => (request) => {
    request.header.set("authorization", `Bearer ${token}`);
    return next(request);
  };
  const secure = tls === true ? {} : tls || undefined;
  const socket = address.startsWith("unix:") ? address.slice("unix:".length) : undefined;
  return createGrpcTransport({
    baseUrl: `${secure ? "https" : "http"}://${socket === undefined ? address : "localhost"}`,
    interceptors: [...(token ? [authorize] : []), ...(options.interceptors ?? [])],
    readMaxBytes: maxMessageBytes,
    writeMaxBytes: maxMessageBytes,
    // Notices a server that vanished without a word; the server allows a ping every 10 s.
    pingIntervalMs: 30_000,
    pingTimeoutMs: 20_000,
    nodeOptions: {
      ...(secure && {
        ca: pem(secure.ca),
        cert: pem(secure.certificate),
        key: pem(secure.key),
        servername: secure.serverName,
      }),
      ...(socket !== undefined && { createConnection: () => connectSocket(socket) }),
    },
  });
}

function pem(value: string | Uint8Array | undefined): string | Buffer | undefined {
  return value instanceof Uint8Array ? Buffer.from(value) : value;
}

/**
 * Makes a call, and makes it again while the server is unavailable. `attempt` must fail only before any reply has
 * begun: what has begun is never sent twice.
 */
export async function repeated<T>(retry: boolean, attempt: () => Promise<T>, signal?: AbortSignal): Promise<T> {
  for (let tried = 1; ; tried++) {
    try {
      return await attempt();
    } catch (thrown) {
      if (!retry || tried >= tries || !mayRepeat(thrown) || signal?.aborted) {
        throw KvforkError.from(thrown);
      }
      const wanted = pushback(thrown as ConnectError);
      const pause = Math.min(firstPauseMs * 2.5 ** (tried - 1), longestPauseMs) * (0.8 + 0.4 * Math.random());
      try {
        await sleep(wanted ?? pause, undefined, { signal });
      } catch {
        throw KvforkError.from(thrown); // given up meanwhile
      }
    }
  }
}
