"""Bearer tokens with roles, of which only hashes are kept, and limits on how often a caller may call."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import select
from sqlalchemy.orm import Session

from wise_atta import errors
from wise_atta.serve.ledger import Ledger, Token

Role = Literal["client", "annotator", "admin"]
ROLES: tuple[str, ...] = get_args(Role)
# A revoked token may still be taken for so many seconds.
_FRESH = 1.0


@dataclass(frozen=True)
class Caller:
    """A caller whose token is known: name and role."""

    name: str
    role: str

    def may(self, role: str) -> bool:
        """Whether the caller has a role; an admin has all of them."""
        return self.role in (role, "admin")


def create(session: Session, name: str, role: str) -> str:
    """A new token. This is the only time that it can be read."""
    if role not in ROLES:
        raise errors.unknown("role", role, ROLES)
    if not (0 < len(name) <= 64 and name.isprintable()):
        raise errors.BadConfig("a token's name has 1 to 64 printable characters")
    if session.scalars(select(Token).where(Token.name == name)).first() is not None:
        raise errors.Conflict(f"there is a token {name!r} already: names stay in the ledger, so use another one")
    public, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    session.add(Token(id=public, name=name, role=role, digest=_digest(secret), created_at=time.time()))
    return f"wa_{public}_{secret}"


def revoke(session: Session, name: str) -> None:
    """Revoke a token by its name."""
    row = session.scalars(select(Token).where(Token.name == name)).first()
    if row is None:
        raise errors.UnknownName(f"there is no token {name!r}")
    row.revoked_at = row.revoked_at or time.time()


def _digest(secret: str) -> str:
    # 256 random bits need no slow hash: they cannot be enumerated.
    return hashlib.sha256(secret.encode()).hexdigest()


class Gate:
    """Tells who is calling.

    Parameters
    ----------
    ledger
        Where the tokens are.
    open_without_tokens
        Whether everybody is an admin as long as no token was ever made. For a service that only this machine can reach.
    """

    def __init__(self, ledger: Ledger, *, open_without_tokens: bool) -> None:
        self.ledger = ledger
        self.open_without_tokens = open_without_tokens
        self._known: dict[str, tuple[str, Caller | None]] = {}
        self._read_at = -_FRESH
        self._lock = threading.Lock()

    def _tokens(self, also: str | None = None) -> dict[str, tuple[str, Caller | None]]:
        """All tokens, read anew when they are old or when `also` is not among them."""
        with self._lock:
            if (also is not None and also not in self._known) or time.monotonic() - self._read_at >= _FRESH:
                with self.ledger.read() as session:
                    rows = session.scalars(select(Token)).all()
                self._known = {
                    row.id: (row.digest, Caller(row.name, row.role) if row.revoked_at is None else None) for row in rows
                }
                self._read_at = time.monotonic()
            return self._known

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        return self.open_without_tokens and not self._tokens()

    def caller(self, header: str | None, *, look: bool = True) -> Caller | None:
        """Who sent this Authorization header; None if nobody who is known.

        `look` says whether the ledger is asked about a token that is not known yet, or only once a second.
        """
        scheme, _, token = (header or "").partition(" ")
        parts = token.strip().split("_", 2)
        well_formed = scheme.lower() == "bearer" and len(parts) == 3 and parts[0] == "wa"
        tokens = self._tokens(also=parts[1] if well_formed and look else None)
        if self.is_open:
            return Caller("local", "admin")
        if not well_formed:
            return None
        digest, caller = tokens.get(parts[1], ("", None))
        right = hmac.compare_digest(digest.encode(), _digest(parts[2]).encode())
        return caller if right else None


class Buckets:
    """Token buckets, one a caller, refilled at a steady rate: how many more requests may be sent now.

    Parameters
    ----------
    rate
        Requests per second; 0 lifts the limit.
    burst
        What a full bucket holds.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        self._left: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, who: str, now: float | None = None) -> float:
        """Take one; 0 if there was one, else the seconds until there is."""
        if not self.rate:
            return 0.0
        now = time.monotonic() if now is None else now
        with self._lock:
            left = self._level(who, now)
            if left >= 1:
                self._left[who] = (left - 1, now)
                return 0.0
            return (1 - left) / self.rate

    def wait(self, who: str, now: float | None = None) -> float:
        """The same without taking one."""
        if not self.rate:
            return 0.0
        with self._lock:
            return max(1 - self._level(who, time.monotonic() if now is None else now), 0.0) / self.rate

    def _level(self, who: str, now: float) -> float:
        left, then = self._left.get(who, (float(self.burst), now))
        if len(self._left) > 10_000:
            # Full buckets say nothing; dropping them bounds the memory that strangers can take.
            full = self.burst / self.rate
            self._left = {name: pair for name, pair in self._left.items() if now - pair[1] < full}
        return min(self.burst, left + (now - then) * self.rate)
