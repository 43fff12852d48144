"""The walk over a tree of configs: types, finite numbers, declared bounds; one error, by the full path of the field."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Interval, Le, Len, Lt, Predicate
from torchtitan.config import Configurable

from torchtitan.experiments.rl.bounds import (
    OF_OTHERS,
    AtMost,
    Cure,
    Matches,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    check_config,
    check_fields,
)
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import ConfigError

T = TypeVar("T")


class Shape(UserConfigurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        sides: Annotated[int, Ge(3)] = 3


class Square(Shape):
    @dataclass(kw_only=True, slots=True)
    class Config(Shape.Config):
        sides: int = 4
        length: PositiveFloat = 1.0


class Silent(Protocol):
    def quiet(self) -> bool: ...


@dataclass(kw_only=True, slots=True)
class Drawing:
    shapes: dict[str, Shape.Config] = field(
        default_factory=lambda: {"big": Square.Config(length=9)}
    )
    undo: list[Shape.Config] = field(default_factory=lambda: [Shape.Config(), Square.Config()])
    size: tuple[Share, NonNegativeFloat] = (0.5, 3)
    path: tuple[PositiveInt, ...] = (1, 2)
    frame: Shape.Config | None = None
    grid: PositiveInt | None = None
    zoom: Annotated[float, Gt(0), Lt(10), Cure("zoom in steps")] = 2
    mode: Literal["ink", "pencil"] | None = "ink"
    title: NonEmptyStr = "x"
    tags: set[str] = field(default_factory=lambda: {"a"})
    colours: dict[Literal["r", "g"], Share] = field(default_factory=lambda: {"r": 1})
    either: list[int] | list[str] = field(default_factory=lambda: ["a"])
    visible: bool = True
    brush: Callable[[int], int] = abs
    dtype: torch.dtype = torch.float32
    extra: Any = None
    quiet: Silent | None = None


def drawing(**changes) -> Drawing:
    made = Drawing()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


GOOD = [
    dict(size=(0, 0.0)),
    dict(path=()),
    dict(frame=Square.Config()),
    dict(grid=1),
    dict(mode=None),
    dict(tags=set()),
    dict(either=[1, 2]),
    dict(zoom=np.float32(1.5), grid=np.int64(3)),
    dict(zoom=Fraction(1, 3)),
    dict(extra=[math.nan, {"anything": Ellipsis}]),
    dict(quiet="may be anything: the protocol can't be asked about at run time"),
]


@pytest.mark.parametrize("changes", [{}, *GOOD], ids=str)
def test_values_of_their_types_and_within_their_bounds_pass(changes):
    check_fields(drawing(**changes), field="d")


BAD = [
    # bounds
    (dict(grid=0), "d.grid = 0: must be at least 1"),
    (dict(zoom=0), "d.zoom = 0: must be above 0 and below 10; zoom in steps"),
    (dict(zoom=10.0), "d.zoom = 10.0: must be above 0 and below 10; zoom in steps"),
    (dict(title=""), "d.title = '': must not be empty"),
    (dict(size=(1.1, 0)), "d.size[0] = 1.1: must be at least 0 and at most 1"),
    (dict(size=(1.0, -0.1)), "d.size[1] = -0.1: must be at least 0"),
    (dict(path=(3, 2, 0)), "d.path[2] = 0: must be at least 1"),
    (dict(colours={"r": 0.0, "g": 2}), "d.colours.g = 2: must be at least 0 and at most 1"),
    (dict(frame=Shape.Config(sides=2)), "d.frame.sides = 2: must be at least 3"),
    (
        dict(shapes={"a": Shape.Config(), "b": Square.Config(length=0)}),
        "d.shapes.b.length = 0: must be above 0",
    ),
    (
        dict(undo=[Shape.Config(), Square.Config(sides=2)]),
        "d.undo[1].sides = 2: must be at least 3",
    ),
    (dict(extra=[{"x": Shape.Config(sides=1)}]), "d.extra[0].x.sides = 1: must be at least 3"),
    # finite numbers
    (
        dict(zoom=math.nan),
        "d.zoom = nan: must be a finite number and above 0 and below 10; zoom in steps",
    ),
    (dict(size=(0.5, math.inf)), "d.size[1] = inf: must be a finite number and at least 0"),
    (dict(size=(0.5, 10**400)), f"d.size[1] = {10**400}: must be a finite number and at least 0"),
    # types
    (dict(grid="3"), "d.grid = '3': must be a whole number or None"),
    (dict(grid=True), "d.grid = True: must be a whole number or None"),
    (dict(grid=3.0), "d.grid = 3.0: must be a whole number or None"),
    (dict(zoom="2"), "d.zoom = '2': must be a number; zoom in steps"),
    (dict(zoom=False), "d.zoom = False: must be a number; zoom in steps"),
    (dict(zoom=None), "d.zoom = None: must be a number; zoom in steps"),
    (dict(visible=1), "d.visible = 1: must be True or False"),
    (dict(title=None), "d.title = None: must be a text"),
    (dict(mode="chalk"), "d.mode = 'chalk': must be one of 'ink', 'pencil' or None"),
    (dict(size=[0.5, 3]), "d.size = [0.5, 3]: must be a tuple of 2"),
    (dict(size=(0.5,)), "d.size = (0.5,): must be a tuple of 2"),
    (dict(path=[1]), "d.path = [1]: must be a tuple"),
    (dict(undo=()), "d.undo = (): must be a list"),
    (dict(undo=None), "d.undo = None: must be a list"),
    (dict(shapes=[]), "d.shapes = []: must be a dict"),
    (dict(shapes={1: Shape.Config()}), "d.shapes = 1: must be a text"),
    (dict(shapes={"a": None}), "d.shapes.a = None: must be a Shape.Config"),
    (dict(frame="square"), "d.frame = 'square': must be a Shape.Config or None"),
    (dict(frame=Square.Config), "d.frame = <class"),
    (dict(colours={"b": 1}), "d.colours = 'b': must be one of 'r', 'g'"),
    (dict(either=[1, "a"]), "d.either[0] = 1: must be a text"),
    (dict(tags=["a"]), "d.tags = ['a']: must be a set"),
    (dict(brush=3), "d.brush = 3: must be a Callable"),
    (dict(dtype="float32"), "d.dtype = 'float32': must be a dtype"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_wrong_value_is_one_error_with_its_path_and_the_cure(changes, message):
    with pytest.raises(ConfigError) as error:
        check_fields(drawing(**changes), field="d")
    assert str(error.value).startswith(message)
    assert error.value.field == message.partition(" = ")[0]


def test_paths_of_a_whole_run_have_no_prefix():
    with pytest.raises(ConfigError) as error:
        check_fields(drawing(frame=Shape.Config(sides=0)))
    assert error.value.field == "frame.sides"


def test_a_users_own_config_is_checked_for_what_it_declares():
    class Blob(Shape):
        @dataclass(kw_only=True, slots=True)
        class Config(Shape.Config):
            wobble: Annotated[float, Interval(ge=-1, lt=1)] = 0.0
            note: Annotated[str, "not a bound"] = ""
            odd: Annotated[int, Predicate(bool)] = 0
            colours: Annotated[list[str], Len(2, 3)] = field(default_factory=lambda: ["r", "g"])

    check_fields(Blob.Config(), field="b")
    for name, value, cure in (
        ("wobble", 1.0, "must be at least -1 and below 1"),
        ("sides", 2, "must be at least 3"),
        ("colours", ["r"], "must have at least 2 entries and have at most 3 entries"),
        (
            "colours",
            ["r", "g", "b", "a"],
            "must have at least 2 entries and have at most 3 entries",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            check_fields(Blob.Config(**{name: value}), field="b")
        assert (error.value.field, error.value.cure) == (f"b.{name}", cure)


def test_texts_match_and_a_field_is_at_most_another():
    @dataclass(kw_only=True)
    class Span:
        low: Annotated[int, AtMost("high")] = 1
        high: int = 2
        unit: Annotated[str, Matches("k?m", "a length")] | None = None

    check_fields(Span(low=2, unit="km"), field="s")
    for span, message in (
        (Span(low=3), "s.low = 3: must be at most high = 2"),
        (Span(high="2"), "s.high = '2': must be a whole number"),
        (Span(unit="m\n"), "s.unit = 'm\\n': must be a length"),
    ):
        with pytest.raises(ConfigError) as error:
            check_fields(span, field="s")
        assert str(error.value) == message


def test_none_on_either_side_is_no_limit():
    @dataclass(kw_only=True)
    class Span:
        low: Annotated[int | None, AtMost("high")] = None
        high: int | None = None

    for span in (Span(), Span(low=3), Span(high=2), Span(low=2, high=2)):
        check_fields(span, field="s")
    with pytest.raises(ConfigError, match="s.low = 3: must be at most high = 2"):
        check_fields(Span(low=3, high=2), field="s")


def test_a_field_declared_anew_with_its_type_alone_keeps_the_bounds_and_one_with_bounds_changes_them():
    class Triangle(Square):
        @dataclass(kw_only=True, slots=True)
        class Config(Square.Config):
            sides: Annotated[int, Ge(1), Le(3)] = 3
            length: float = 2.0

    check_fields(Triangle.Config(sides=1), field="t")
    for name, value, cure in (
        ("sides", 4, "must be at least 1 and at most 3"),
        ("length", 0, "must be above 0"),
    ):
        with pytest.raises(ConfigError) as error:
            check_fields(Triangle.Config(**{name: value}), field="t")
        assert (error.value.field, error.value.cure) == (f"t.{name}", cure)


def test_a_type_that_can_not_be_told_is_not_checked_and_the_other_fields_are():
    @dataclass
    class Unresolved(Generic[T]):
        steps: NonNegativeInt
        item: T
        later: "NoSuchName"  # noqa: F821

    check_fields(Unresolved(0, None, 1), field="u")
    with pytest.raises(ConfigError, match="u.steps = -1: must be at least 0"):
        check_fields(Unresolved(-1, None, 1), field="u")


def test_bounds_for_another_packages_class_are_given_beside_it():
    @dataclass
    class Theirs:
        warmup: int
        ratio: float | None = None

    @dataclass
    class Ours:
        schedule: Theirs

    OF_OTHERS[Theirs] = {"ratio": Share | None}
    check_fields(Ours(Theirs(-3)))
    for theirs, message in (
        (Theirs(0, 2.0), "schedule.ratio = 2.0: must be at least 0 and at most 1"),
        (Theirs("0"), "schedule.warmup = '0': must be a whole number"),
    ):
        with pytest.raises(ConfigError) as error:
            check_fields(Ours(theirs))
        assert str(error.value) == message


def test_fields_come_before_what_relates_them():
    @dataclass
    class Span:
        low: NonNegativeInt
        high: NonNegativeInt

        def validate(self, *, field: str, unit: str) -> None:
            if self.low > self.high:
                raise ConfigError(f"{field}.low", self.low, f"must be at most {self.high} {unit}")

    check_config(Span(1, 2), field="s", unit="m")
    for span, message in (
        (Span(3, 2), "s.low = 3: must be at most 2 m"),
        (Span(3, -1), "s.high = -1: must be at least 0"),
    ):
        with pytest.raises(ConfigError) as error:
            check_config(span, field="s", unit="m")
        assert str(error.value) == message
