"""torchstore 0.1.2 on Monarch 0.7.0: a controller that it accepts, a client that leaks less.

torchstore's own controller mixes sync and async endpoints in one actor, which Monarch refuses. Here
all of them are async. Importing torchstore sets ``HYPERACTOR_CODEC_MAX_FRAME_LENGTH`` if it is not
set, and warns of that on the terminal.
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
    """torchstore's controller, whose sync endpoints are overridden by async ones."""

    @endpoint
    async def teardown(self) -> None:
        # torchstore's own teardown would wait for a volume whose process may have ended.
        self.storage_volumes = None
        await Controller.teardown._method(self)


def _as_async(name: str) -> Any:  # noqa: ANN401 - Monarch's
    """Return an async endpoint that calls a sync endpoint of torchstore's controller.

    ``Endpoint._method`` is the function that Monarch's decorator has wrapped.
    """
    method = getattr(Controller, name)._method

    @functools.wraps(method)
    async def call(
        self: Controller,
        *args: Any,  # noqa: ANN401 - the endpoint's
        **kwargs: Any,  # noqa: ANN401 - the endpoint's
    ) -> Any:  # noqa: ANN401 - the endpoint's
        return method(self, *args, **kwargs)

    return endpoint(call)


for _name in ("get_controller_strategy", "locate_volumes", "notify_put", "keys", "notify_delete"):
    setattr(AsyncController, _name, _as_async(_name))


class SparingClient(LocalClient):
    """Client of a store with one volume, which holds objects and no tensors.

    ``put`` and ``get`` are one call each, to the volume. torchstore's own ``get`` first calls the
    controller twice, and its ``put`` tells the controller what was put.
    """

    def __init__(
        self,
        controller: Any,  # noqa: ANN401 - Monarch's
        strategy: Any,  # noqa: ANN401 - torchstore exports no type of it
    ):
        super().__init__(OneActor(controller), strategy)

    async def put(self, key: str, value: Any) -> None:  # noqa: ANN401 - any object
        volume, _ = self.strategy.select_storage_volume()
        await Pipe(volume).put_to_storage_volume(key, Request.from_any(value))

    async def get(
        self, key: str, inplace_tensor: None = None, tensor_slice_spec: None = None
    ) -> Any:  # noqa: ANN401 - any object
        volume, _ = self.strategy.select_storage_volume()
        return await Pipe(volume).get_from_storage_volume(key, Request.from_any(None))


def use_async_controller() -> None:
    """Make this process's torchstore spawn, and call, the async controller.

    Call it before any put or get.
    """
    torchstore.api.Controller = AsyncController
    torchstore.api.LocalClient = SparingClient
