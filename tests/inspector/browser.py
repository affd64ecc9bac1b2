"""A client of the inspector as its page is one, without a browser. Owns no judgement of what comes back."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 60.0


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> tuple[int, str, str]:
        """HTTP status, code and reason of a refusal."""
        error = self.json["error"]
        return self.status, error["code"], error["reason"]


class Refused(Exception):
    """A stream that was not begun, and the answer in its place."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


@dataclass
class Page:
    """One open page: an address, and the token in its tab."""

    url: str
    token: str = ""
    context: ssl.SSLContext | None = None
    headers: dict[str, str] = field(default_factory=dict)  # of every request; None as a value leaves one out

    def get(self, path: str = "/", **headers: str | None) -> Reply:
        return self.ask("GET", path, b"", headers)

    def call(self, name: str, message: object = None, **headers: str | None) -> Reply:
        return self.ask("POST", f"/api/{name}", json.dumps(message or {}).encode(), headers)

    def stream(self, name: str, message: object = None) -> Iterator[Any]:
        """Messages as they come; leaving it closes the connection. Raises Refused."""
        connection = self._connection()
        try:
            self._send(connection, "POST", f"/api/{name}", json.dumps(message or {}).encode(), {})
            reply = connection.getresponse()
            if reply.status != 200:
                raise Refused(_whole(reply))
            for line in reply:
                yield json.loads(line)
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str | None]) -> Reply:
        connection = self._connection()
        try:
            self._send(connection, method, path, body, headers)
            return _whole(connection.getresponse())
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        where = urlsplit(self.url).netloc
        if self.context is not None:
            return http.client.HTTPSConnection(where, timeout=PATIENCE, context=self.context)
        return http.client.HTTPConnection(where, timeout=PATIENCE)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes, more: dict[str, str | None]
    ) -> None:
        headers: dict[str, str | None] = {"host": urlsplit(self.url).netloc}
        if method == "POST":
            headers |= {"origin": self.url.rstrip("/"), "content-type": "application/json"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        headers |= self.headers | {name.replace("_", "-"): value for name, value in more.items()}
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if value is not None:
                connection.putheader(name, value)
        if method == "POST":
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)


def _whole(reply: http.client.HTTPResponse) -> Reply:
    return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())
