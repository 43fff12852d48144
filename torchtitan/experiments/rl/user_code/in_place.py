"""Calls async user code in the asyncio task of its caller: for what is called in every turn.

An asyncio task and a timer of its own cost a call 13 us, where the library's whole path of a turn takes 170. Here there is
neither until the code waits for something. The rules of user_code/calls.py hold all the same, but for one: code that ignores
its cancellation is closed, and does not run on.

The caller's task has to be one that serves such code alone, as a rollout's does: what the code does to "its" task, it does to
that. Where it cancels it, that is taken back.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from torchtitan.experiments.rl.user_code.bounded import CANCEL_GRACE_S, UserCodeError, UserCodeTimeout, failure, too_late
from torchtitan.experiments.rl.user_code.watch import HOLD_S, Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def call_in_place(function: Callable[..., Any], *args: Any, timeout_s: float, owner: str = "") -> Any:
    """Await ``function(*args)`` for at most ``timeout_s`` seconds, as ``call_user`` does.

    Args:
        function: an async function.
        owner: whose function it is, such as "SumEnv.reset"; begins the message of the errors, unless empty.

    Raises:
        UserCodeTimeout: it took longer, or blocked the event loop beyond its limit.
        UserCodeError: it raised anything.
        asyncio.CancelledError: the caller was cancelled.
    """
    watch = Watch(timeout_s, owner)
    call = _Call(function, args, watch)
    error: BaseException | None = None
    value = None
    try:
        value = await call
    except BaseException as raised:
        if call.closed:
            raise
        error = raised
    finally:
        call.end()
    if call.cancelled_itself:
        await _take_cancellation()
    if call.interrupted(error):
        raise asyncio.CancelledError
    failed: UserCodeError | None = call.late or (too_late(watch) if watch.blocked_s else None)
    if failed is None and error is not None:
        failed = failure(error)
    if failed is not None:
        message = f"{owner}: {failed}" if owner else str(failed)
        raise (failed.again(message) if isinstance(failed, UserCodeTimeout) else UserCodeError(message)) from error
    return value


async def _answer(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _take_cancellation() -> None:
    """Take a cancellation of the running task that was taken back before it arrived."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        running = asyncio.current_task()
        if running is not None and running.cancelling():
            raise


class _Call:
    """One call. Its task is cancelled when it is late, and the cancellation taken back when the code has ended."""

    __slots__ = (
        "_abandoned",
        "_args",
        "_before",
        "_cancellations",
        "_extended",
        "_function",
        "_seen_cancellation",
        "_task",
        "_timer",
        "_wakes_at",
        "_watch",
        "cancelled_itself",
        "closed",
        "late",
    )

    def __init__(self, function: Callable[..., Any], args: tuple, watch: Watch):
        task = asyncio.current_task()
        assert task is not None
        self._function, self._args, self._watch, self._task = function, args, watch, task
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        self._extended = self._abandoned = False
        self._cancellations = 0
        """Of the task, requested here and not taken back."""
        self.late: UserCodeTimeout | None = None
        self._seen_cancellation = False
        self._before = task.cancelling()
        self.cancelled_itself = False
        """The code has cancelled the task and ended without awaiting."""
        self.closed = False
        """Its coroutine was closed from outside, as at the end of an event loop."""

    def __await__(self) -> Generator[Any, Any, Any]:
        watch, task = self._watch, self._task
        before = task.cancelling()
        try:
            awaitable = watch.begin(lambda: self._function(*self._args))
            steps = watch.steps(awaitable if inspect.iscoroutine(awaitable) else _answer(awaitable)).__await__()
            resume: Callable[[Any], Any] = steps.send
            argument: Any = None
            while True:
                waits_for = resume(argument)
                while task.cancelling() > before:  # by the code itself: it is thrown in, as an error of its own
                    task.uncancel()
                if watch.blocked_s and self.late is None:
                    self._end_as_late()
                elif self._timer is None:
                    self._set_timer(watch.left_s())
                try:
                    argument = yield waits_for
                    resume = steps.send
                except GeneratorExit:
                    self.closed = True
                    steps.close()
                    raise
                except BaseException as error:
                    before = task.cancelling()
                    if isinstance(error, asyncio.CancelledError):
                        if self._abandoned:
                            return self._close(steps)
                        self._seen_cancellation |= before > self._cancellations
                    resume, argument = steps.throw, error
                else:
                    before = task.cancelling()
        except StopIteration as end:
            return end.value
        finally:
            while task.cancelling() > before and not self.closed:
                task.uncancel()
                self.cancelled_itself = True

    def end(self) -> None:
        """The code has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._watch.leave()
        for _ in range(self._cancellations):
            self._task.uncancel()

    def interrupted(self, error: BaseException | None) -> bool:
        """Whether the caller has been cancelled, and not the code by itself.

        Python 3.11's TaskGroup leaves a cancellation of its own behind. So where the code ended as if there had been none, the
        call that this one is part of knows.

        Args:
            error: what the code raised.
        """
        if not self._seen_cancellation or self._task.cancelling() <= self._before:
            return False
        if isinstance(error, asyncio.CancelledError) or self._watch.is_outermost or self._watch.caller_stopped:
            return True
        while self._task.cancelling() > self._before:
            self._task.uncancel()
        return False

    def _set_timer(self, seconds: float) -> None:
        self._wakes_at = time.monotonic() + seconds
        self._timer = self._task.get_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        left_s = self._watch.left_s()
        # The timer was late: something else held up the event loop, which may have the code's next step ready.
        if not self._extended and (overslept_s := time.monotonic() - self._wakes_at) > HOLD_S:
            left_s, self._extended = max(left_s, overslept_s), True
        if left_s > 0 and not self._watch.blocked_s:
            self._set_timer(left_s)
        else:
            self._end_as_late()

    def _end_as_late(self) -> None:
        self.late = too_late(self._watch)
        self._cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._task.get_loop().call_later(CANCEL_GRACE_S, self._abandon)

    def _abandon(self) -> None:
        self._abandoned = True
        self._cancel()

    def _cancel(self) -> None:
        self._cancellations += 1
        self._task.cancel()

    def _close(self, steps: Generator[Any, Any, Any]) -> None:
        logger.warning("user code ignored its cancellation and was closed: %s", self._watch.owner)
        try:
            steps.close()
        except BaseException as error:
            logger.warning("%s raised %s when it was closed", self._watch.owner, type(error).__name__)
