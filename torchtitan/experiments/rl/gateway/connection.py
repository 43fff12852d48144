"""Connection of an agent's client, which says more of the client's end than aiohttp asks for.

    socket ─ transport ─▶ Connection ─▶ aiohttp's protocol ─▶ Gateway

Every event is handed on. Two of them are looked at, because aiohttp takes both for a client that
has gone:

1. A client may end what it sends and wait for its answer (``nc -N``). One that has gone looks the
   same, until it is sent something and resets the connection. So it is sent an interim response,
   which clients of HTTP 1.1 skip.
2. A client that closes its connection with bytes unread resets it, and did not read its last
   answer. If it has asked again on the connection, or has closed it in order, then it did.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp.web_protocol import RequestHandler

PROBE_S = 0.5
"""Seconds between interim responses to a client that has ended what it sends."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(asyncio.Protocol):
    """Connection of a client, from its accept to its end."""

    def __init__(self, http: RequestHandler, connections: "set[Connection]"):
        """Wait for the transport.

        Args:
            http: aiohttp's protocol, to which all events are handed on.
            connections: open connections of the server, to which this one is added.
        """
        self._http = http
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._has_asked = False
        """True if the client has sent something since the last answer."""
        self._is_answering = False
        self._knows_interim = False
        self._has_begun = False
        """True if the response has begun, so that no interim response may be sent."""
        self._is_half_closed = False
        """True if the client has ended what it sends."""
        self._probe: asyncio.TimerHandle | None = None
        self._take_back: Callable[[], None] | None = None
        """Function that takes back the last delivery, until the client shows that it was one."""

    # Events of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._has_asked = True
        self._take_back = None
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        """Return True to keep the connection open: the client may still wait for its answer."""
        self._take_back = None
        if not (self._has_asked or self._is_answering):
            return cast(bool | None, self._http.eof_received())
        self._is_half_closed = True
        if self._is_answering:
            self._look_for_client()
        else:  # the server may not have seen the request yet, or it has no end
            self._probe = asyncio.get_running_loop().call_later(PROBE_S, self.abort)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and self._take_back is not None:
            self._take_back()
        self._connections.discard(self)
        self._stop_looking()
        self._http.connection_lost(error)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    # What the server does with a connection.

    @contextmanager
    def answering(self, *, knows_interim: bool) -> Iterator[None]:
        """Keep the connection for a client that ends what it sends while it is being answered.

        Args:
            knows_interim: True if the client's HTTP has interim responses, as 1.1 has.
        """
        self._is_answering = True
        self._knows_interim = knows_interim
        self._has_begun = False
        if self._is_half_closed:
            self._stop_looking()
            self._look_for_client()
        try:
            yield
        finally:
            self._is_answering = False
            self._has_asked = False
            self._stop_looking()
            if self._is_half_closed:
                self._http.close()  # after the response

    def begin_response(self) -> None:
        """Send no interim response from now on: the response begins."""
        self._has_begun = True

    @property
    def is_open(self) -> bool:
        """True if the client has not reset the connection, nor closed it."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self._was_reset()

    def delivered(self, take_back: Callable[[], None]) -> None:
        """Note that an answer was handed over.

        Args:
            take_back: called if the client turns out not to have read the answer.
        """
        self._take_back = take_back

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _look_for_client(self) -> None:
        """Have a client that has gone reset the connection, and end the connection if it has."""
        transport = self._transport
        assert transport is not None, "the connection was made"
        if self._knows_interim and not self._has_begun:
            transport.write(INTERIM)
        if self._was_reset() or not self._knows_interim:
            transport.abort()
        else:
            loop = asyncio.get_running_loop()
            self._probe = loop.call_later(PROBE_S, self._look_for_client)

    def _stop_looking(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    def _was_reset(self) -> bool:
        """Return True if a client that has ended what it sends has reset the connection since.

        After the end of a client's bytes asyncio does not read any more, and so sees no reset.
        """
        if not self._is_half_closed or self._transport is None:
            return False
        own_socket = self._transport.get_extra_info("socket")
        return bool(own_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


def connection_of(transport: asyncio.BaseTransport | None) -> Connection:
    """Return the connection with this transport.

    Raises:
        ConnectionResetError: the connection was lost.
    """
    if transport is None:
        raise ConnectionResetError("the client has gone")
    return cast(Connection, cast(asyncio.Transport, transport).get_protocol())
