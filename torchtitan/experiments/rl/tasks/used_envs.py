"""Which envs rollouts have had: each env is for one rollout, which closes it."""

import weakref
from collections.abc import Callable

from torchtitan.experiments.rl.envs.message_env import MessageEnv

_USED: dict[int, weakref.ref] = {}
"""By id; an entry goes when its env does. Not a WeakSet: an env may have a ``__hash__`` or ``__eq__`` of its own."""


def first_use(env: MessageEnv) -> bool:
    """Note that a rollout has the env. False: another had it before, in any group of this process."""
    key = id(env)
    if key in _USED and _USED[key]() is env:
        return False
    _USED[key] = weakref.ref(env, _forgetting(key))
    return True


def _forgetting(key: int) -> Callable[[weakref.ref], None]:
    def forget(gone: weakref.ref) -> None:
        if _USED.get(key) is gone:  # the id may be another env's by now
            del _USED[key]

    return forget
