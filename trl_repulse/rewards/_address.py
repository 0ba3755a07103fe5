"""Addresses of reward servers: what is sent to them, and the part of it that may be shown."""

import html
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit


@dataclass(frozen=True)
class Address:
    """
    An address whose user info and query stay out of messages and logs.

    Args:
        shown (`str`):
            Scheme, host, port and path.
        url (`str`):
            The same with the query, for the HTTP library.
        auth (`tuple[str, str]`, *optional*):
            User and password.
        secrets (`frozenset[str]`):
            What a server may repeat in its answer, and nobody else may read.
    """

    shown: str
    url: str = field(repr=False)
    auth: tuple[str, str] | None = field(repr=False)
    secrets: frozenset[str] = field(repr=False)


def parse_address(url: str) -> Address:
    """
    Takes an address apart.

    Args:
        url (`str`):
            Address of a server.

    Returns:
        [`Address`]

    Raises:
        `ValueError`: If no request can be sent there. What it says of the address holds no secret.
    """
    url = url.strip()
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:  # a port that is no number
        valid, port = False, ""
    if not valid or not (parts.path + parts.query).isascii() or re.search(r"[\s\x00-\x1f\x7f]", url):
        # Where it cannot be taken apart, nothing says which part of it is a secret
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
    """
    A text without secrets, however they were written in it.

    Args:
        text (`str`):
            What a server or a library said.
        secrets (`frozenset[str]`):
            What is replaced.

    Returns:
        `str`
    """
    written = {way(secret) for secret in secrets for way in (str, quote, html.escape, lambda s: quote(s, safe=""))}
    for secret in sorted(written, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, "***")
    return text
