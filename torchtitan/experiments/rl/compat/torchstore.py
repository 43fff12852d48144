"""torchstore 0.1.2 on Monarch 0.7.0: a controller that Monarch accepts, and a client whose calls keep little memory.

torchstore's own mixes sync and async endpoints in one actor, which Monarch refuses. Here all of them are async. Importing
torchstore sets ``HYPERACTOR_CODEC_MAX_FRAME_LENGTH``, with a warning on the terminal, where it is not set.
"""

import functools
from typing import Any

import torchstore.api
from monarch.actor import endpoint
from torchstore.client import LocalClient
from torchstore.controller import Controller
from torchstore.transport import Pipe, Request

from torchtitan.experiments.rl.compat.monarch import OneActor


class AsyncController(Controller):
    """Overrides each sync endpoint."""

    @endpoint
    async def teardown(self) -> None:
        self.storage_volumes = (
            None  # torchstore's own would wait for a volume whose process may have ended
        )
        await Controller.teardown._method(self)


def _as_async(name: str) -> Any:
    """``Endpoint._method`` is the function that Monarch's decorator wrapped."""
    method = getattr(Controller, name)._method

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return endpoint(call)


for _name in ("get_controller_strategy", "locate_volumes", "notify_put", "keys", "notify_delete"):
    setattr(AsyncController, _name, _as_async(_name))


class SparingClient(LocalClient):
    """Of a store with one volume that holds objects and no tensors: ``put`` and ``get`` are one call each, to the volume.

    torchstore's own ``get`` asks the controller twice before, and its ``put`` tells it what was put.
    """

    def __init__(self, controller: Any, strategy: Any):
        super().__init__(OneActor(controller), strategy)

    async def put(self, key: str, value: Any) -> None:
        volume, _ = self.strategy.select_storage_volume()
        await Pipe(volume).put_to_storage_volume(key, Request.from_any(value))

    async def get(
        self, key: str, inplace_tensor: None = None, tensor_slice_spec: None = None
    ) -> Any:
        volume, _ = self.strategy.select_storage_volume()
        return await Pipe(volume).get_from_storage_volume(key, Request.from_any(None))


def use_async_controller() -> None:
    """Make this process's torchstore spawn, and speak to, the async controller. Call before any put or get."""
    torchstore.api.Controller = AsyncController
    torchstore.api.LocalClient = SparingClient
