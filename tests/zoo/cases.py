"""All cases: places x kinds, and kinds that make sense in one place only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.zoo.misbehaviour import FEW_RAISES, HANGS, RAISES, Kind, blocks
from tests.zoo.own import OWN
from tests.zoo.places import PLACES, Place

Ends = Literal["refused", "refused again", "harmless", "noted", "overflows"]
"""Explained in `checks.problems`."""

VARIANTS = (
    "env.reset, plain", "env.step_message, plain", "env.close, plain", "reward function, plain",
    "reward function, group", "reward function, group, plain", "filter.matches, post", "rubric.register_funcs",
    "renderer.bridge_to_next_turn", "renderer.parse_response", "teacher.score", "echo.keep", "env.__init__", "rubric.setup",
    "algorithm.setup",
)  # fmt: skip
"""Places that share their way with another: they get fewer ways to raise."""


LATE = ("blocks", "hangs", "hangs through cancellation")


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    place: Place
    kind: Kind
    ends: Ends
    late: bool = False
    """It meets a limit."""
    blocks_loop: bool = False
    """It holds up the event loop: rollouts beside it may time out too."""


def cases() -> Iterator[Case]:
    for name, place in PLACES.items():
        ends: Ends = "noted" if place.named_in_log else "refused"
        kinds = dict(FEW_RAISES if name in VARIANTS else RAISES)
        if place.waits:
            kinds |= HANGS
        if place.block_s is not None:
            kinds |= blocks(place.block_s)
        for kind_name, kind in kinds.items():
            blocks_loop = kind_name == "blocks" and (place.waits or place.scope != "rollout")
            yield Case(
                name=f"{name}: {kind_name}",
                place=place,
                kind=kind,
                ends=ends,
                late=kind_name in LATE,
                blocks_loop=blocks_loop,
            )
        for kind_name, (own_ends, kind) in OWN.get(name, {}).items():
            yield Case(name=f"{name}: {kind_name}", place=place, kind=kind, ends=own_ends)
