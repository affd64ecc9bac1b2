"""Bearer tokens. Owns how one is made, how it is written down, and how a caller's is found.

A tokens file has one token a line, of which it holds the SHA-256 only:

    # owner   token                    [admin]   comments and empty lines are passed over
    alice     sha256:<64 hex digits>
    ops       sha256:<64 hex digits>   admin

Two lines for one owner are two tokens, both good: that is how a token is replaced. A plain hash is enough because our
tokens have 256 random bits; a slow hash protects what people can remember, and nobody is to choose a token.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from service.auth.callers import Caller, owner_name

PREFIX = "kvf_"  # so that a token that leaked into a text is recognised by those who look for such
LONGEST = 4096  # characters; a token of another maker may be longer than ours
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_ADMIN = "admin"


class TokensUnusable(Exception):
    """A table of tokens that cannot be used. The text names the line, never what stands in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """One token: whose it is, and the SHA-256 of it."""

    caller: Caller
    digest: bytes

    def __str__(self) -> str:
        return f"{self.caller.owner} sha256:{self.digest.hex()}{' admin' if self.caller.admin else ''}"


def new_token(owner: str, *, admin: bool = False) -> tuple[str, TokenLine]:
    """A token that nobody has had, and the line that makes it good. ValueError if `owner` is no name."""
    token = PREFIX + secrets.token_urlsafe(32)
    return token, TokenLine(caller=Caller(owner_name(owner), admin), digest=digest_of(token))


def digest_of(token: str) -> bytes:
    """What the server keeps of a token."""
    return hashlib.sha256(token.encode()).digest()


def parse_tokens(text: str, what: str) -> TokenTable:
    """The table that `text` writes down; `what` names it in errors. Raises TokensUnusable."""
    lines: list[TokenLine] = []
    # Python's own idea of a line ends it at eight other characters too, of which a comment may have any.
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{what}, line {number}"
        if len(words) not in (2, 3) or words[2:] not in ([], [_ADMIN]):
            raise TokensUnusable(f'{where}: must be an owner, sha256:<64 hex digits>, and at most the word "admin"')
        hashed = _HASH.fullmatch(words[1])
        if hashed is None:
            raise TokensUnusable(f"{where}: the second word must be sha256: and 64 hexadecimal digits, not a token")
        try:
            owner = owner_name(words[0])
        except ValueError as error:
            raise TokensUnusable(f"{where}: {error}") from None
        lines.append(TokenLine(caller=Caller(owner, len(words) == 3), digest=bytes.fromhex(hashed[1])))
    if not lines:
        raise TokensUnusable(f"{what}: there is no token in it")
    return TokenTable(lines, what)


class TokenTable:
    """All good tokens. Immutable."""

    def __init__(self, lines: Iterable[TokenLine], what: str = "the tokens") -> None:
        """Raises TokensUnusable if one token is listed twice for different callers."""
        # The place in the dictionary is a keyed hash under a key of this process: how long a look-up takes says nothing
        # about the digests. The digest itself is compared in constant time.
        self._key = secrets.token_bytes(32)
        self._lines: dict[bytes, TokenLine] = {}
        for line in lines:
            have = self._lines.setdefault(self._place(line.digest), line)
            if have.caller != line.caller:
                raise TokensUnusable(f"{what}: one token stands there for {have.caller.owner} and {line.caller.owner}")

    def __len__(self) -> int:
        return len(self._lines)

    def find(self, token: str) -> Caller | None:
        """Whose token it is; None if nobody's."""
        digest = digest_of(token)
        line = self._lines.get(self._place(digest))
        return line.caller if line is not None and hmac.compare_digest(line.digest, digest) else None

    def _place(self, digest: bytes) -> bytes:
        return hmac.digest(self._key, digest, "sha256")
