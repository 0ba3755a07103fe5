"""Addresses of reward servers, and the part of them that may be shown."""

import html
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit


@dataclass(frozen=True)
class Address:
    """
    An address whose user info and query are kept out of messages and logs.

    `shown` has scheme, host, port and path, `url` the query too; `auth` is user and password, and `secrets` holds what
    a server may repeat in an answer but nobody else may read.
    """

    shown: str
    url: str = field(repr=False)
    auth: tuple[str, str] | None = field(repr=False)
    secrets: frozenset[str] = field(repr=False)


def parse_address(url: str) -> Address:
    """Parses a server's address. Raises `ValueError`, without secrets in the message, if it is not valid."""
    url = url.strip()
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:  # an invalid port
        valid, port = False, ""
    if not valid or not (parts.path + parts.query).isascii() or re.search(r"[\s\x00-\x1f\x7f]", url):
        # An address that cannot be parsed may hold a secret anywhere
        given = repr(url) if not re.search("[@?#]", url) else "another (not shown: it may hold a key)"
        raise ValueError(f"`url` must be like 'http://host:port/path', got {given}.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    user = None
    if parts.username is not None:
        user = unquote(parts.username), unquote(parts.password or "")
    said = {parts.username, parts.password, parts.query, *(user or ())}
    said |= {value for _, value in parse_qsl(parts.query)}
    shown = f"{parts.scheme}://{host}{port}{parts.path or '/'}"
    url = shown + (f"?{parts.query}" if parts.query else "")
    return Address(shown, url, user, frozenset(value for value in said if value))


def hide(text: str, secrets: frozenset[str]) -> str:
    """Replaces secrets in a text by `***`, also if they are URL- or HTML-encoded."""
    written = {way(secret) for secret in secrets for way in (str, quote, html.escape, lambda s: quote(s, safe=""))}
    for secret in sorted(written, key=len, reverse=True):  # longest first: one may contain another
        text = text.replace(secret, "***")
    return text
