"""The decision who a caller is. Owns the order of what counts and the refusals; reads no file and no socket.

nothing configured      everybody is `local`: such a server listens on this machine only
a bearer token          its owner; one that is not good is refused, whatever else the caller can show
no token, certificates  the client certificate's name: its one subject alternative name, else its common name
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from service.auth.callers import LOCAL, Caller, owner_name
from service.auth.tokens import LONGEST, TokenTable
from service.errors import Unauthenticated

_HINT = 'send the metadata "authorization: Bearer TOKEN"'

Metadata = Iterable[tuple[str, str | bytes]]


class Authenticator:
    """Immutable but for `tokens`, which a reload replaces."""

    def __init__(
        self,
        *,
        tokens: TokenTable | None = None,
        certificates: bool = False,
        admins: frozenset[str] = frozenset(),
    ) -> None:
        """`certificates`: the transport lets nobody in without a client certificate that it has verified."""
        self.tokens = tokens
        self._certificates = certificates
        self._admins = admins

    def by_metadata(self, metadata: Metadata) -> Caller | None:
        """Who it is; None if only the certificate can tell. Raises Unauthenticated."""
        if self.tokens is None:
            return None if self._certificates else LOCAL
        values = [value for key, value in metadata if key == "authorization"]
        if not values:
            if self._certificates:
                return None
            raise Unauthenticated("this server wants a token, and there is none", hint=_HINT, reason="TOKEN_MISSING")
        token = _bearer(values)
        caller = self.tokens.find(token) if token is not None else None
        if caller is None:
            raise Unauthenticated("the token is not one of this server's", hint=_HINT, reason="TOKEN_UNKNOWN")
        return self._raised(caller)

    def by_certificate(self, peer: Mapping[str, Iterable[bytes]]) -> Caller:
        """`peer` is what the transport tells of a verified certificate. Raises Unauthenticated."""
        kinds = ("x509_subject_alternative_name", "x509_common_name")
        given = ([name for name in peer.get(kind, ()) if name] for kind in kinds)
        names = next(filter(None, given), [])
        if len(names) != 1:
            text = "has no name" if not names else "has several names, so it is not clear whose it is"
            raise Unauthenticated(
                f"the client certificate {text}",
                hint="use one with a single subject alternative name, or send a token"
                if self.tokens is not None
                else "use one with a single subject alternative name",
                reason="CERTIFICATE_UNUSABLE",
            )
        try:
            return self._raised(Caller(owner_name(names[0].decode())))
        except ValueError:  # also not UTF-8
            raise Unauthenticated(
                "the client certificate's name cannot be an owner's", reason="CERTIFICATE_UNUSABLE"
            ) from None

    def _raised(self, caller: Caller) -> Caller:
        return Caller(caller.owner, admin=True) if caller.owner in self._admins else caller


def _bearer(values: list[str | bytes]) -> str | None:
    """The token of the one authorization value there is; None if it is not of that form."""
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    scheme, _, token = values[0].partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= LONGEST else None
