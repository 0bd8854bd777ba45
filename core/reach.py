"""Connect to addresses that somebody else named: only where those may be reached, and within a deadline.

Whoever names the address must not get at what only this host reaches. The name is resolved once, each address that it
has is checked, and the connection goes to one that was: so a name that changes its address in between gains nothing.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from time import monotonic
from typing import Any
from urllib.parse import SplitResult

import httpcore
import httpx

from core.settings import Network

EVERYWHERE: tuple[Network, ...] = (ip_network("0.0.0.0/0"), ip_network("::/0"))
"""For an address that the operator named."""
_ASSIGNED = ip_network("2000::/3")
"""Of IPv6 all that is on the public internet (RFC 4291, section 2.4); beyond are forms that hide an IPv4 address."""
_SPECIAL = tuple(
    map(
        ip_network,
        (
            "192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20",
            # This stands for an IPv4 address that it doesn't show at first sight.
            "2002::/16",
        ),
    )
)  # fmt: skip
"""Of IANA's special-purpose addresses those that not every Python counts among them."""


class UnreachableError(Exception):
    """There was no answer; the text says why."""


def may_reach(address: str, networks: Sequence[Network], *, public: bool = True) -> bool:
    """Whether this is an address of one of `networks`, or, where that is wanted, of the public internet."""
    found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if any(found in network for network in networks):
        return True
    if not public:
        return False
    if isinstance(found, IPv6Address) and found not in _ASSIGNED:
        return False
    return found.is_global and not found.is_multicast and not any(found in network for network in _SPECIAL)


def beyond(host: str, setting: str) -> str:
    """Why a host is not reached, and who can change that."""
    return (
        f"{host[:255]} is not on the public internet; whoever runs this server can let its network be reached with "
        f"{setting}"
    )


def target_of(parts: SplitResult) -> httpcore.URL:
    """A URL for httpcore, which wants an IPv6 address without its brackets."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return httpcore.URL(scheme=parts.scheme, host=parts.hostname or "", port=parts.port, target=target)


@contextmanager
def answered(seconds: float) -> Iterator[None]:
    """Let what is wrong with a connection be an UnreachableError, in words; `seconds` is how long it waits."""
    try:
        yield
    except httpcore.TimeoutException as error:
        raise UnreachableError(f"it did not answer within {seconds:g} s") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol) as error:
        raise UnreachableError(f"the connection failed: {str(error) or type(error).__name__}"[:500]) from error


@cache
def ssl_context() -> ssl.SSLContext:
    """What TLS is spoken by."""
    return httpx.create_ssl_context()


class Deadline:
    """For all of a request, and for each silence in it."""

    def __init__(self, seconds: float, *, silence: float | None = None) -> None:
        self._at, self._silence = monotonic() + seconds, silence

    def left(self) -> float:
        """Seconds that the next call may take; httpcore's ReadTimeout where there are none."""
        if (left := self._at - monotonic()) <= 0:
            raise httpcore.ReadTimeout
        return left if self._silence is None else min(left, self._silence)


class Guarded(httpcore.NetworkBackend):
    """Connects to addresses that may be reached, and gives each call on them the time that is left in all.

    A limit for each read alone would let an answer come a byte at a time for ever.
    """

    def __init__(
        self, networks: Sequence[Network], deadline: Deadline, *, setting: str, refused: str | None = None
    ) -> None:
        """`networks` may be reached beside the public internet; `setting` is what the operator names them with.

        `refused` is why the public internet may not be, where it may not.
        """
        self._networks, self._deadline, self._setting, self._refused = networks, deadline, setting, refused
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
            raise UnreachableError(beyond(host, self._setting))
        if self._refused and not all(may_reach(address, self._networks, public=False) for address in addresses):
            raise UnreachableError(self._refused)
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
    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
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
