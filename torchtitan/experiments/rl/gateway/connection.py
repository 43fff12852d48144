"""Connection of an agent's client, which tells a client that has gone from one that still reads.

    socket ─ transport ─▶ Connection ─▶ aiohttp's protocol ─▶ Gateway

Every event is handed on to aiohttp. Two of them need a closer look, because aiohttp takes both for
a client that has gone:

1. The client ends what it sends. It may still wait for its answers (``nc -N``), or have closed the
   connection. The server is sent the same packet in both cases, and keep-alive probes are
   acknowledged in both for a minute; only a client that is sent bytes after it has closed resets
   the connection. So the client is sent interim responses, which clients of HTTP 1.1 skip.
2. The client resets the connection. If it does so soon after an answer, then it closed the
   connection with bytes of it unread. It has read the answer if it asks again on the connection,
   closes it in order, or leaves it idle for `READ_S`.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp.web import RequestHandler

PROBE_S = 0.5
"""Seconds between interim responses to a client that has ended what it sends."""
READ_S = 5.0
"""Seconds after which an answer that was sent counts as read. A reset that comes later is that of
an idle connection."""
SENDING_S = 0.05
"""Seconds between looks at an answer that the client takes slowly."""
EVENTS_TO_NEXT = 10
"""Iterations of the event loop in which aiohttp begins the next request, if the client has sent it
before the last one was answered."""
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
        """True if a request of the client, or a part of one, is not answered yet."""
        self._is_answering = False
        """True while the server answers a request."""
        self._knows_interim = False
        """True if the client skips interim responses."""
        self._has_begun = False
        """True if the response has begun, so that no interim response may be sent."""
        self._is_half_closed = False
        """True if the client has ended what it sends."""
        self._is_reset = False
        """True if the client was seen to have reset the connection after it ended what it sends."""
        self._probe: asyncio.TimerHandle | None = None
        """Next look for a client that has ended what it sends."""
        self._next_look: asyncio.Handle | None = None
        """Next look for a request that aiohttp begins after the last answer."""
        self._take_back: Callable[[], None] | None = None
        """Function that takes back the last delivery, until the client shows that it was one."""
        self._delivered_at = 0.0
        """Time of the last delivery, on the event loop's clock."""

    # Events of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._has_asked = True
        self._stop_waiting()
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
        elif self._next_look is None:
            # The server may not have seen the request yet, or it has no end.
            self._probe = asyncio.get_running_loop().call_later(PROBE_S, self.abort)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and self._take_back is not None:
            idle_s = asyncio.get_running_loop().time() - self._delivered_at
            if idle_s < READ_S:
                self._take_back()
        self._connections.discard(self)
        self._stop_looking()
        self._stop_waiting()
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
        self._stop_waiting()
        if self._is_half_closed:
            self._stop_looking()
            self._look_for_client()
        try:
            yield
        finally:
            self._is_answering = False
            self._stop_looking()
            self._wait_for_next(EVENTS_TO_NEXT)

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
        self._delivered_at = asyncio.get_running_loop().time()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _wait_for_next(self, events: int) -> None:
        """Wait for aiohttp to begin a request that it has already, and else note that it has none.

        A client that has ended what it sends has no other request, so its connection ends then.
        """
        transport = self._transport
        assert transport is not None, "the connection was made"
        self._next_look = None
        if transport.is_closing():
            return
        loop = asyncio.get_running_loop()
        if events > 0:
            self._next_look = loop.call_soon(self._wait_for_next, events - 1)
            return
        if transport.get_write_buffer_size() > 0:  # the answer is still being sent
            self._next_look = loop.call_later(SENDING_S, self._wait_for_next, EVENTS_TO_NEXT)
            return
        self._has_asked = False
        if self._is_half_closed:
            transport.close()

    def _stop_waiting(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

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
        if self._is_half_closed and self._transport is not None and not self._is_reset:
            own_socket = self._transport.get_extra_info("socket")
            # The kernel forgets the error once it was read.
            self._is_reset = bool(own_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        return self._is_reset


def connection_of(transport: asyncio.BaseTransport | None) -> Connection:
    """Return the connection with this transport.

    Raises:
        ConnectionResetError: the connection was lost.
    """
    if transport is None:
        raise ConnectionResetError("the client has gone")
    return cast(Connection, cast(asyncio.Transport, transport).get_protocol())
