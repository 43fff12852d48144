"""Times a call of user code: how long it ran by itself, where it waits, and whether it held up the event loop.

A call's time is the clock's since its first step, less the time that other calls held up the event loop meanwhile. Calls that a
call makes belong to it: what they hold up counts as its own.
"""

import contextvars
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")

HOLD_S = 0.005
"""A step that runs longer has held up the event loop."""
TIMER_S = 0.001
"""How early an event loop's timer may be: uvloop counts milliseconds."""
NOT_THE_USERS = ("/asyncio/", f"/{Path(__file__).parent.name}/")
"""Folders whose functions no call is said to wait in."""


class BlockingCalls:
    """Counts calls that held up the event loop for longer than their limit."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> None:
        """One more call."""
        self._count += 1

    def lap(self) -> int:
        """Calls since the last lap."""
        count, self._count = self._count, 0
        return count


BLOCKING = BlockingCalls()
"""Of this process."""


class _Held(threading.local):
    seconds = 0.0
    """For which watched calls have held up the event loop of this thread."""


_HELD = _Held()
_CALLER: contextvars.ContextVar["Watch | None"] = contextvars.ContextVar("watched call that runs", default=None)


class Watch:
    """One call. ``steps`` wraps its coroutine; the rest says what became of it."""

    __slots__ = (
        "limit_s",
        "owner",
        "blocked_s",
        "blocked_by",
        "_began",
        "_caller",
        "_coroutine",
        "_held_before",
        "_inner",
        "_own_s",
    )

    def __init__(self, limit_s: float | None, owner: str = ""):
        """
        Args:
            owner: whose code it is, such as "SumRubric.setup"; empty: unnamed.
        """
        self.limit_s = math.inf if limit_s is None else limit_s
        self.owner = owner
        self.blocked_s = 0.0
        """Length of the step that held up the event loop until the limit was exceeded; 0 where there is none."""
        self.blocked_by = ""
        """Owner of that step: of this call, or of one inside it."""
        self._began: float | None = None
        self._held_before = self._own_s = 0.0
        self._coroutine: Any = None
        self._inner: dict[Watch, None] = {}
        """Calls that it made and that have not ended."""
        self._caller = _CALLER.get()
        if self._caller is not None:
            self._caller._inner[self] = None

    def steps(self, coroutine: Coroutine[Any, Any, T]) -> "_Steps[T]":
        """The coroutine, timed."""
        self._coroutine = coroutine
        return _Steps(coroutine, self)

    def over(self) -> None:
        """The call has ended or is abandoned."""
        if self._caller is not None:
            self._caller._inner.pop(self, None)

    def leave(self) -> None:
        """The call is over; its caller goes on in the same asyncio task."""
        self.over()
        _CALLER.set(self._caller)

    def begin(self, call: Callable[[], T]) -> T:
        """Start the call: what ``call()`` gives. Calls that are made inside it are found by the context of the asyncio task: it
        is the call's own, or ``leave`` is called at the end."""
        _CALLER.set(self)
        self._held_before = _HELD.seconds
        self._began = began = time.monotonic()
        try:
            return call()
        finally:
            if (ended := time.monotonic()) - began > HOLD_S:
                self.hold(began, ended)

    def left_s(self) -> float:
        """What is left of its limit; 0 where a timer can't measure it."""
        left_s = self.limit_s - self._ran_s(time.monotonic())
        return left_s if left_s > TIMER_S else 0.0

    def hold(self, began: float, ended: float, held_before: float | None = None) -> None:
        """One of its steps held up the event loop.

        Args:
            held_before: for how long calls had held it up when the step began: what a call inside this step has held up since
                then is that call's.
        """
        inside_s = 0.0 if held_before is None else _HELD.seconds - held_before
        if (seconds := ended - began - inside_s) <= HOLD_S:
            return
        began = ended - seconds
        _HELD.seconds += seconds
        late, watch = False, cast(Watch | None, self)
        while watch is not None:
            watch._own_s += seconds
            if watch._ran_s(began) < watch.limit_s <= watch._ran_s(ended):
                watch.blocked_s, watch.blocked_by, late = seconds, self.owner, True
            watch = watch._caller
        if late:
            BLOCKING.add()

    def waits_in(self) -> str:
        """What it waits for: the call inside it that has not ended, and the innermost of the user's functions, with file and
        line; empty where that is not known."""
        for inner in reversed(self._inner):
            if found := inner.waits_in():
                return found
        function, coroutine = "", self._coroutine
        while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
            code = coroutine.cr_code
            if not any(folder in code.co_filename for folder in NOT_THE_USERS):
                file = code.co_filename.rsplit("/", 1)[-1]
                function = f"{code.co_qualname.rpartition('<locals>.')[2]} ({file}:{coroutine.cr_frame.f_lineno})"
            coroutine = coroutine.cr_await
        if not self.owner or function.startswith(f"{self.owner} "):
            return function
        return f"{self.owner}, at {function}" if function else self.owner

    def _ran_s(self, now: float) -> float:
        """Its own time; ``now`` is now, or when a step began that ends now."""
        if self._began is None:
            return 0.0
        return now - self._began - (_HELD.seconds - self._held_before - self._own_s)


class _Steps(Awaitable[T]):
    """Awaits something and times each of its steps, from one await to the next."""

    def __init__(self, awaitable: Awaitable[T], watch: Watch):
        self._awaitable, self._watch = awaitable, watch

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._awaitable.__await__()
        watch, clock, held = self._watch, time.monotonic, _HELD
        resume: Callable[[Any], Any] = steps.send
        argument: Any = None
        while True:
            began, held_before = clock(), held.seconds
            try:
                waits_for = resume(argument)
            except StopIteration as end:
                return end.value
            finally:
                if (ended := clock()) - began > HOLD_S:
                    watch.hold(began, ended, held_before)
            try:
                argument = yield waits_for
                resume = steps.send
            except BaseException as error:
                resume, argument = steps.throw, error
