"""Kinds of misbehaviour: what a method does in place of what it should.

A kind does something first (``do``), gives another answer (``answer``), changes the honest answer (``change``), or answers
honestly after it did something to what it was given (``meddle``).
"""

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.zoo.world import WORLD
from torchtitan.experiments.rl.errors import ConfigError, RunError, UserCodeError


@dataclass(kw_only=True, frozen=True)
class Kind:
    do: Callable[[], Any] | None = None
    """Raises, blocks or gives a coroutine; where it returns, the honest answer follows."""
    answer: Callable[[], Any] | None = None
    """Called in place of the method."""
    change: Callable[..., Any] | None = None
    """Called with the honest answer, then the method's arguments (self first)."""
    meddle: Callable[..., Any] | None = None
    """Called with the method's arguments (self first). The honest answer was computed before: a function that reverses its list
    and answers in that order is wrong by itself, and a case is about what it does to others."""


def raising(error: Callable[[], BaseException]) -> Kind:
    def do() -> None:
        raise error()

    return Kind(do=do)


def answering(value: Callable[[], Any]) -> Kind:
    return Kind(answer=value)


def changing(change: Callable[..., Any]) -> Kind:
    return Kind(change=lambda answer, *args: change(answer))


class Unwinding(BaseException):
    """As a framework's own signal may be: no Exception."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class UnprintableBase(BaseException):
    def __str__(self) -> str:
        raise ValueError(4)

    __repr__ = __str__


def recursion() -> None:
    recursion()


def leave() -> None:
    sys.exit(3)


async def hang() -> None:
    await asyncio.sleep(3600)


async def hang_through_cancellation() -> None:
    ends = time.monotonic() + 8
    while time.monotonic() < ends:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            pass


async def leave_later() -> None:
    await asyncio.sleep(0.01)
    sys.exit(3)


RAISES = {
    "raises": raising(lambda: ValueError("bad\nluck")),
    "raises without a message": raising(lambda: ValueError()),
    "raises KeyError": raising(lambda: KeyError(2)),
    "raises a base exception": raising(lambda: Unwinding("out of here")),
    "raises GeneratorExit": raising(GeneratorExit),
    "raises StopIteration": raising(lambda: StopIteration(1)),
    "raises StopAsyncIteration": raising(StopAsyncIteration),
    "exits": Kind(do=leave),
    "exits with a text": raising(lambda: SystemExit("closing time")),
    "interrupts": raising(KeyboardInterrupt),
    "cancels itself": raising(asyncio.CancelledError),
    "times out by itself": raising(lambda: TimeoutError("late")),
    "raises what has no text": raising(Unprintable),
    "raises a base exception that has no text": raising(UnprintableBase),
    "raises a lone surrogate": raising(lambda: ValueError("half \ud800 a character")),
    "raises escape sequences": raising(lambda: ValueError("\x1b[2J\x1b]0;x\x07 \u202e \x9b31m")),
    "raises a million characters": raising(lambda: ValueError("x " * 500_000)),
    "raises a group": raising(
        lambda: ExceptionGroup("several", [ValueError("one"), TypeError("two")])
    ),
    "raises a group with an exit": raising(
        lambda: BaseExceptionGroup("several", [SystemExit(1), ValueError("one")])
    ),
    "raises the library's RunError": raising(lambda: RunError("nobody in particular")),
    "raises the library's ConfigError": raising(lambda: ConfigError("field", 1, "no cure")),
    "raises the library's UserCodeError": raising(lambda: UserCodeError("nobody in particular")),
    "raises AssertionError": raising(AssertionError),
    "runs out of stack": Kind(do=recursion),
    "runs out of memory": raising(MemoryError),
    "imports what is not there": raising(lambda: ImportError("no_such_package")),
    "is not implemented": raising(NotImplementedError),
}
"""In every place."""

FEW_RAISES = {
    name: RAISES[name]
    for name in (
        "raises", "raises a base exception", "exits", "interrupts", "cancels itself", "raises StopIteration",
        "raises what has no text", "raises a lone surrogate", "raises the library's RunError", "raises a group with an exit",
    )
}  # fmt: skip
"""In places that are a variant of another."""


def blocks(seconds: float) -> dict[str, Kind]:
    """A plain function that is late, or an async one that does not await."""
    return {"blocks": Kind(do=functools.partial(time.sleep, seconds))}


HANGS = {
    "hangs": Kind(do=hang),
    "hangs through cancellation": Kind(do=hang_through_cancellation),
    "exits after a while": Kind(do=leave_later),
}
"""Only where the place is async."""

WRONG_TYPES = {
    "answers None": answering(lambda: None),
    "answers a number": answering(lambda: 7),
    "answers a text": answering(lambda: "four"),
    "answers bytes": answering(lambda: b"four"),
    "answers an object": answering(object),
    "answers a class": answering(lambda: ValueError),
    "answers an exception": answering(lambda: ValueError("returned, not raised")),
    "answers a dict": answering(lambda: {"done": True}),
    "answers an empty list": answering(list),
    "answers a set": answering(lambda: {0.0, 1.0, 2.0, 3.0}),
    "answers a generator": answering(lambda: (x for x in (0.0, 1.0, 2.0, 3.0))),
    "answers nan": answering(lambda: float("nan")),
    "answers itself, nested": answering(lambda: _nested()),
}


class LyingLength:
    """Says it has four entries, and fails at each."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        raise SystemExit(5)

    def __iter__(self) -> Any:
        raise SystemExit(5)


class LyingNumber:
    """Looks like a number, and fails when it is read."""

    def __float__(self) -> float:
        raise KeyError("no value")

    __int__ = __index__ = __bool__ = __float__

    def __repr__(self) -> str:
        raise ValueError(6)

    __str__ = __repr__


def _nested() -> list[Any]:
    nested: list[Any] = []
    nested.append(nested)
    return nested


def misbehaving(
    base: type,
    method: str,
    kind: Kind,
    *,
    name: str,
    when: Callable[..., bool],
    plain: bool = False,
) -> type:
    """A subclass of ``base`` called ``name``, whose ``method`` misbehaves where ``when(self, *args)``.

    Args:
        plain: an async method becomes a plain function.
    """
    function = meddled(getattr(base, method), kind, when=when, plain=plain)
    # As if it had been written in the class: a stack says so.
    function.__code__ = function.__code__.replace(co_qualname=f"{name}.{method}")
    return type(name, (base,), {method: function, "__module__": __name__})


def meddled(
    honest: Callable[..., Any], kind: Kind, *, when: Callable[..., bool], plain: bool = False
) -> Any:
    """``honest`` with the kind in its place; async where it is, unless ``plain``."""

    @functools.wraps(honest)
    async def late(*args: Any, **kwargs: Any) -> Any:
        if not when(*args, **kwargs):
            return await honest(*args, **kwargs)
        WORLD.calls += 1
        if kind.do is not None:
            answer = kind.do()
            return await answer if inspect.iscoroutine(answer) else await honest(*args, **kwargs)
        if kind.answer is not None:
            return kind.answer()
        value = await honest(*args, **kwargs)
        if kind.meddle is not None:
            kind.meddle(*args, **kwargs)
            return value
        assert kind.change is not None
        return kind.change(value, *args)

    @functools.wraps(honest)
    def at_once(*args: Any, **kwargs: Any) -> Any:
        def answer() -> Any:
            value = honest(*args, **kwargs)
            return _run(value) if inspect.iscoroutine(value) else value

        if not when(*args, **kwargs):
            return answer()
        WORLD.calls += 1
        if kind.do is not None:
            kind.do()
            return answer()
        if kind.answer is not None:
            return kind.answer()
        value = answer()
        if kind.meddle is not None:
            kind.meddle(*args, **kwargs)
            return value
        assert kind.change is not None
        return kind.change(value, *args)

    return late if inspect.iscoroutinefunction(honest) and not plain else at_once


def _run(coroutine: Any) -> Any:
    """The value of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")
