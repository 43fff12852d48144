"""Base of the classes that users subclass: tasks, datasets, samplers, rubrics, algorithms, ..."""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.config import Configurable
from torchtitan.experiments.rl.compat.torchtitan import built_class

if TYPE_CHECKING:  # trainers render nothing, and the import takes seconds
    from renderers import Renderer


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Facts of a run that its tasks, algorithms and filters may need beside their configs."""

    renderer: "Renderer"
    """Renderer of the policy's tokenizer, which makes prompts of messages."""
    vocab_size: int
    """Number of token ids that the policy's model has."""
    seed: int = 0
    """Seed of the run."""


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


def build_with(config: Configurable.Config, context: BuildContext) -> Any:  # noqa: ANN401 - any part
    """Build an algorithm or a filter, with the context if its constructor has that parameter.

    A part that needs the renderer or the size of the vocabulary takes it there::

        def __init__(self, config: Config, *, context: BuildContext):
            super().__init__(config)
            self._renderer = context.renderer
    """
    return config.build(context=context) if takes_context(built_class(config)) else config.build()


def takes_context(part: type) -> bool:
    """Return True if the constructor of a class has the parameter ``context``.

    A constructor that passes on all it is given (``**arguments``) has those of the next class.
    """
    for base in part.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        parameters = inspect.signature(constructor).parameters
        if "context" in parameters:
            return True
        kinds = [parameter.kind for parameter in parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return False
    return False
