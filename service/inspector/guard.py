"""Whose page a request comes from, and what a browser may do with an answer. Pure decisions; knows no socket.

A browser sends requests of any page to this server, and a name that its owner points at 127.0.0.1 makes such a page
this server's in the browser's eyes. So

* Host has to be an address, localhost, or, with TLS, a name of the certificate: a foreign name is DNS rebinding;
* Origin, and Sec-Fetch-Site of what does something, have to say, where there are such, that the page is this server's
  own: else it is forgery. A link from elsewhere to the page itself is none;
* what does something is a POST of JSON, which no form of a foreign page can send and no browser sends unasked.

There are no cookies: nothing of a caller goes along by itself.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from service.inspector.http import Header, Request

HEADERS: tuple[Header, ...] = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
    ("cache-control", "no-store"),
)
"""Of every answer."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")


def refusal(request: Request, *, tls: bool, loopback: bool, names: Collection[str]) -> str:
    """Why a request is not answered; "" if it is. `names`: of the certificate, wildcards among them.

    `loopback`: the listener is, so that no other address than a loopback one is its own.
    """
    hosts = request.all("host")
    if len(hosts) != 1 or (match := _HOST.fullmatch(hosts[0])) is None:
        return "one Host header is needed"
    if not _is_ours(match[1].lower(), loopback=loopback, names=names):
        return "the Host header names another server"
    scheme = "https" if tls else "http"
    if any(origin != f"{scheme}://{hosts[0].lower()}" for origin in request.all("origin")):
        return "the Origin header names another page"
    if request.method == "POST":
        kinds = [value.partition(";")[0].strip().lower() for value in request.all("content-type")]
        if kinds != ["application/json"]:
            return "the Content-Type has to be application/json"
        if any(site != "same-origin" for site in request.all("sec-fetch-site")):
            return "the request comes from another page"
    return ""


def _is_ours(host: str, *, loopback: bool, names: Collection[str]) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        host = host.removesuffix(".")
        wild = "*." + host.partition(".")[2]
        return any(name.lower() in (host, wild) for name in names)
    return address.is_loopback or not loopback
