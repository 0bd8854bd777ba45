"""POST to an address that somebody else named: to networks that may be reached, within a deadline, following nothing.

Whoever names the address must not get at what only this host reaches. The name is resolved once, each address that it
has is checked, and the connection goes to one that was: so a name that changes its address in between gains nothing.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from time import monotonic
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpcore
import httpx

from core.errors import InvalidRequest
from core.settings import Network

SECONDS = 10.0
"""How long one request may take, from looking up the name to the answer's status."""
LONGEST_URL = 2048
_URL = re.compile(r"[\x21-\x7e]+")
_SPECIAL = tuple(
    map(
        ip_network,
        (
            "192.0.0.0/24", "192.88.99.0/24", "100::/64", "2001::/23", "3fff::/20", "5f00::/16", "fec0::/10",
            # These stand for an IPv4 address that they don't show at first sight.
            "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16",
        ),
    )
)  # fmt: skip
"""Of IANA's special-purpose addresses those that not every Python counts among them."""


class UnreachableError(Exception):
    """There was no answer; the text says why."""


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
    try:
        address = "127.0.0.1" if host == "localhost" or host.endswith(".localhost") else str(ip_address(host))
    except ValueError:
        return
    if not may_reach(address, networks):
        raise InvalidRequest(f"{_beyond(host)}.", param="url")


def may_reach(address: str, networks: Sequence[Network]) -> bool:
    """Whether this is an address of the public internet, or of one of `networks`."""
    found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if any(found in network for network in networks):
        return True
    return found.is_global and not found.is_multicast and not any(found in network for network in _SPECIAL)


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
    sent = {"Host": parts.netloc, "Content-Length": str(len(body)), **headers}
    try:
        with (
            httpcore.ConnectionPool(
                ssl_context=_ssl_context(), network_backend=_Guarded(networks, _Deadline(seconds)), max_connections=1
            ) as pool,
            pool.stream("POST", _without_brackets(parts), headers=list(sent.items()), content=body) as answer,
        ):
            # What else it says is not read: it may be long, or never end.
            return answer.status
    except httpcore.TimeoutException as error:
        raise UnreachableError(f"it did not answer within {seconds:g} s") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol) as error:
        raise UnreachableError(f"the connection failed: {str(error) or type(error).__name__}"[:500]) from error


def _without_brackets(parts: SplitResult) -> httpcore.URL:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return httpcore.URL(scheme=parts.scheme, host=parts.hostname or "", port=parts.port, target=target)


def _beyond(host: str) -> str:
    return (
        f"{host[:255]} is not on the public internet; whoever runs this server can let webhooks reach its network "
        "with TRAINSHED_WEBHOOK_NETWORKS"
    )


@cache
def _ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._at = monotonic() + seconds

    def left(self) -> float:
        if (left := self._at - monotonic()) <= 0:
            raise httpcore.ReadTimeout
        return left


class _Guarded(httpcore.NetworkBackend):
    """Connects to addresses that may be reached, and gives each call on them the time that is left in all.

    A limit for each read alone would let an answer come a byte at a time for ever.
    """

    def __init__(self, networks: Sequence[Network], deadline: _Deadline) -> None:
        self._networks, self._deadline = networks, deadline
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise UnreachableError(f"the name {host[:255]} can't be resolved") from error
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        if not all(may_reach(address, self._networks) for address in addresses):
            raise UnreachableError(_beyond(host))
        trouble: httpcore.NetworkError | None = None
        for address in addresses:
            try:
                stream = self._backend.connect_tcp(
                    address, port, self._deadline.left(), local_address, socket_options or ()
                )
            except httpcore.NetworkError as error:
                trouble = error
            else:
                return _Timed(stream, self._deadline)
        raise trouble or httpcore.ConnectError("the name has no address")


class _Timed(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Timed(self._stream.start_tls(ssl_context, server_hostname, self._deadline.left()), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
