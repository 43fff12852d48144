"""Base of the classes that users subclass: tasks, datasets, samplers, rubrics, algorithms, ..."""

from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable


class UserConfigurable(Configurable):
    """Configurable whose every subclass has a Config that builds that subclass.

    A subclass of torchtitan's Configurable that defines no Config inherits its parent's, so that
    ``Sub.Config().build()`` makes the parent. Here it gets an empty Config of its own, and a
    subclass that only overrides a method is complete::

        class Shorter(Dataset):
            def __len__(self): ...

        Shorter.Config().build()  # a Shorter
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - a subclass narrows it to its Config
        self.config = config

    def __init_subclass__(cls, **kwargs: object) -> None:
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
