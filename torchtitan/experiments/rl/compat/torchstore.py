"""torchstore 0.1.2 on Monarch 0.7.0: a controller that Monarch accepts, and a client whose calls keep little memory.

torchstore's own mixes sync and async endpoints in one actor, which Monarch refuses. Here all of them are async. Importing
torchstore sets ``HYPERACTOR_CODEC_MAX_FRAME_LENGTH``, with a warning on the terminal, where it is not set.
"""

from typing import Any

import torchstore.api
from monarch.actor import endpoint
from torchstore.client import LocalClient
from torchstore.controller import Controller
from torchstore.transport import Pipe, Request

from torchtitan.experiments.rl.compat.monarch import OneActor


class AsyncController(Controller):
    """Overrides each sync endpoint. ``Endpoint._method`` is the function that Monarch's decorator wrapped."""

    @endpoint
    async def get_controller_strategy(self) -> Any:
        return Controller.get_controller_strategy._method(self)

    @endpoint
    async def locate_volumes(self, key: str) -> Any:
        return Controller.locate_volumes._method(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        Controller.notify_put._method(self, key, request, storage_volume_id)

    @endpoint
    async def teardown(self) -> None:
        self.storage_volumes = None  # torchstore's own would wait for a volume whose process may have ended
        await Controller.teardown._method(self)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        return Controller.keys._method(self, prefix)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        Controller.notify_delete._method(self, key, storage_volume_id)


class SparingClient(LocalClient):
    """Of a store with one volume that holds objects and no tensors: ``put`` and ``get`` are one call each, to the volume.

    torchstore's own ``get`` asks the controller twice before, and its ``put`` tells it what was put.
    """

    def __init__(self, controller: Any, strategy: Any):
        super().__init__(OneActor(controller), strategy)

    async def put(self, key: str, value: Any) -> None:
        volume, _ = self.strategy.select_storage_volume()
        await Pipe(volume).put_to_storage_volume(key, Request.from_any(value))

    async def get(self, key: str, inplace_tensor: None = None, tensor_slice_spec: None = None) -> Any:
        volume, _ = self.strategy.select_storage_volume()
        return await Pipe(volume).get_from_storage_volume(key, Request.from_any(None))


def use_async_controller() -> None:
    """Make this process's torchstore spawn, and speak to, the async controller. Call before any put or get."""
    torchstore.api.Controller = AsyncController
    torchstore.api.LocalClient = SparingClient
