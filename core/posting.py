"""POST to an address that somebody else named, within a deadline, following nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpcore

from core.errors import InvalidRequest
from core.reach import Deadline, Guarded, answered, beyond, may_reach, ssl_context, target_of
from core.settings import Network

SECONDS = 10.0
"""How long one request may take, from looking up the name to the answer's status."""
LONGEST_URL = 2048
_URL = re.compile(r"[\x21-\x7e]+")
_SETTING = "TRAINSHED_WEBHOOK_NETWORKS"
_IN_THE_CLEAR = (
    f"what is sent over http:// can be read and changed on its way; use https://, or a network of {_SETTING}"
)


def check_url(url: str, networks: Sequence[Network]) -> None:
    """Raise InvalidRequest for what can't be posted to, as far as that shows without asking the network."""
    if len(url) > LONGEST_URL or not _URL.fullmatch(url):
        raise InvalidRequest(f"A URL is 1 to {LONGEST_URL} characters of ASCII, without white space.", param="url")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest("A URL is needed that begins with https:// or http:// and a host.", param="url")
    if "@" in parts.netloc or parts.fragment:
        raise InvalidRequest("The URL must name no user, password or fragment.", param="url")
    host = parts.hostname or ""
    address = "127.0.0.1" if host == "localhost" or host.endswith(".localhost") else _as_address(host)
    if address is not None and not may_reach(address, networks):
        raise InvalidRequest(f"{beyond(host, _SETTING)}.", param="url")
    # Where a name leads to shows as it is posted to, each time anew.
    may_be_inside = bool(networks) if address is None else may_reach(address, networks, public=False)
    if parts.scheme == "http" and not may_be_inside:
        raise InvalidRequest(f"Not to {host[:255]}: {_IN_THE_CLEAR}.", param="url")


def _as_address(host: str) -> str | None:
    try:
        return str(ip_address(host))
    except ValueError:
        return None


def post(
    url: str,
    *,
    body: bytes,
    headers: Mapping[str, str],
    networks: Sequence[Network],
    seconds: float = SECONDS,
) -> int:
    """The status that is answered, whatever it is; UnreachableError if none came in time."""
    parts = urlsplit(url)
    refused = _IN_THE_CLEAR if parts.scheme == "http" else None
    sent = {"Host": parts.netloc, "Content-Length": str(len(body)), **headers}
    with (
        answered(seconds),
        httpcore.ConnectionPool(
            ssl_context=ssl_context(),
            network_backend=Guarded(networks, Deadline(seconds), setting=_SETTING, refused=refused),
            max_connections=1,
        ) as pool,
        pool.stream("POST", target_of(parts), headers=list(sent.items()), content=body) as answer,
    ):
        # What else it says is not read: it may be long, or never end.
        return answer.status
