"""uvloop's event loop, but for how it starts processes.

libuv forks, and what runs between its fork and its exec may wait for a lock that a thread of the parent held: in a process with
Monarch's and torch's threads the child waits for ever, and the parent's event loop with it, for it reads from the child whether
the exec went well. ``subprocess.Popen`` uses vfork, which runs nothing in between. (0.23.0; seen once in about 1,500 starts.)
"""

import asyncio
import asyncio.unix_events
import os
from typing import Any

import uvloop


class OwnedPipe:
    """A pipe for the event loop alone. uvloop closes a file object that it was given after it has closed its descriptor, whose
    number is by then another thread's."""

    def __init__(self, pipe: Any):
        self._descriptor = os.dup(pipe.fileno())
        pipe.close()

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None: ...


class EventLoop(uvloop.Loop):
    """Processes are started by asyncio's own code, and their ends are seen by pidfd."""

    _debug = False
    subprocess_exec: Any = asyncio.BaseEventLoop.subprocess_exec
    subprocess_shell: Any = asyncio.BaseEventLoop.subprocess_shell

    async def connect_read_pipe(self, protocol_factory: Any, pipe: Any) -> Any:
        return await super().connect_read_pipe(protocol_factory, OwnedPipe(pipe))

    async def connect_write_pipe(self, protocol_factory: Any, pipe: Any) -> Any:
        return await super().connect_write_pipe(protocol_factory, OwnedPipe(pipe))

    async def _make_subprocess_transport(
        self,
        protocol: Any,
        args: Any,
        shell: bool,
        stdin: Any,
        stdout: Any,
        stderr: Any,
        bufsize: int,
        **kwargs: Any,
    ) -> Any:
        waiter = self.create_future()
        transport = asyncio.unix_events._UnixSubprocessTransport(  # type: ignore[attr-defined]  # typeshed leaves it out
            self, protocol, args, shell, stdin, stdout, stderr, bufsize, waiter=waiter, **kwargs
        )
        ended = os.pidfd_open(transport.get_pid())

        def reap() -> None:
            self.remove_reader(ended)
            os.close(ended)
            transport._process_exited(transport._proc.wait())
            # Python 3.11 would let them wait for whatever else holds the pipes open, such as a child of the process.
            waiters, transport._exit_waiters = transport._exit_waiters, []
            for exit_waiter in waiters or ():
                if not exit_waiter.done():
                    exit_waiter.set_result(transport._returncode)

        self.add_reader(ended, reap)
        try:
            await waiter
        except BaseException:
            transport.close()
            await transport._wait()
            raise
        return transport


class EventLoopPolicy(uvloop.EventLoopPolicy):
    def _loop_factory(self) -> EventLoop:
        return EventLoop()
