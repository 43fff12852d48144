"""Base of the classes users subclass: tasks, datasets, samplers, rubrics, algorithms, filters, losses."""

from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable


class UserConfigurable(Configurable):
    """A Configurable whose every subclass has a Config that builds that subclass.

    A Configurable that defines no Config inherits its parent's, and ``Sub.Config().build()`` silently makes the parent.
    Here such a subclass gets an empty Config of its own, so a subclass that only overrides a method is complete.
    """

    def __init__(self, config: Any):
        self.config = config

    def __init_subclass__(cls, **kwargs):
        if "Config" not in cls.__dict__:
            namespace = {
                "__module__": cls.__module__,
                "__qualname__": f"{cls.__qualname__}.Config",
                "__doc__": cls.Config.__doc__,
            }
            config: Any = dataclass(kw_only=True, slots=True)(
                type("Config", (cls.Config,), namespace)
            )
            cls.Config = config  # type: ignore[misc]  # what a class statement in the body would do
        super().__init_subclass__(**kwargs)
