import assert from "node:assert/strict";
import { test } from "node:test";
import { Code, ConnectError } from "@connectrpc/connect";
import { repeated } from "../src/connection.js";
import { Client, KvforkError } from "../src/index.js";

test("a token does not cross a network in the clear", () => {
  const token = "secret";
  for (const address of ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/tmp/socket", "/tmp/socket"]) {
    new Client(address, { token });
  }
  for (const address of ["10.0.0.1:1", "example.org:1", "127.0.0.1.example.org:1"]) {
    assert.throws(() => new Client(address, { token }), TypeError);
    new Client(address, { token, tls: true });
    new Client(address, { token, tls: false });
    new Client(address);
  }
});

test("a URL is no address", () => {
  for (const address of ["", "http://127.0.0.1:1", "https://127.0.0.1:1"]) {
    assert.throws(() => new Client(address), TypeError);
  }
});

test("what never began is tried four times, and no more", async () => {
  let tried = 0;
  const attempt = async () => {
    tried++;
    throw new ConnectError("", Code.Unavailable, { "grpc-retry-pushback-ms": "1" });
  };
  await assert.rejects(repeated(true, attempt), KvforkError);
  assert.equal(tried, 4);
  await assert.rejects(repeated(false, attempt), KvforkError);
  assert.equal(tried, 5);
});

test("giving up ends the wait for the next try", async () => {
  const abort = new AbortController();
  const attempt = async () => {
    setTimeout(() => abort.abort(), 5);
    throw new ConnectError("", Code.Unavailable, { "grpc-retry-pushback-ms": "100000" });
  };
  await assert.rejects(repeated(true, attempt, abort.signal), { code: "UNAVAILABLE" });
});
