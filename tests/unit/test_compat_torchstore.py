"""torchstore has the private names that the library uses."""

import inspect
from typing import Any

import torchstore.api
import torchstore.controller
from torchstore.client import LocalClient
from torchstore.storage_volume import InMemoryStore

from torchtitan.experiments.rl.compat.monarch import OneActor
from torchtitan.experiments.rl.compat.torchstore import (
    AsyncController,
    SparingClient,
    use_async_controller,
)
from torchtitan.experiments.rl.weights.reader import OneVolume


def endpoints_of(actor: type) -> dict[str, object]:
    return {
        name: getattr(actor, name)
        for name in dir(actor)
        if hasattr(getattr(actor, name), "_method")
    }


def test_every_endpoint_of_torchstores_controller_is_async_here():
    theirs, ours = endpoints_of(torchstore.controller.Controller), endpoints_of(AsyncController)
    assert theirs.keys() == ours.keys() and theirs, (
        "Monarch's endpoints no longer keep their function in _method"
    )
    kept_sync = [
        name for name, endpoint in ours.items() if not inspect.iscoroutinefunction(endpoint._method)
    ]
    assert not kept_sync, (
        f"torchstore has new sync endpoints, which AsyncController has to override: {kept_sync}"
    )


def test_overridden_endpoints_take_the_same_arguments_as_torchstores():
    for name, endpoint in endpoints_of(AsyncController).items():
        theirs = inspect.signature(getattr(torchstore.controller.Controller, name)._method)
        ours = inspect.signature(endpoint._method)
        assert list(ours.parameters) == list(theirs.parameters), (
            f"torchstore's {name} has other arguments now"
        )


def test_torchstore_still_needs_it():
    sync = [
        name
        for name, endpoint in endpoints_of(torchstore.controller.Controller).items()
        if not inspect.iscoroutinefunction(endpoint._method)
    ]
    assert sync, "torchstore's controller is async by itself now: AsyncController can go"


def test_torchstore_spawns_the_controller_its_api_module_names(monkeypatch):
    monkeypatch.setattr(torchstore.api, "Controller", torchstore.controller.Controller)
    use_async_controller()
    assert torchstore.api.Controller is AsyncController
    assert "Controller" in torchstore.api._controller.__code__.co_names, (
        "torchstore.api no longer looks Controller up by name"
    )


async def test_torchstores_client_calls_in_the_way_that_keeps_little(monkeypatch):
    called = []

    class Endpoint:
        def __init__(self, name: str):
            self._name = name

        async def choose(self, *args) -> Any:
            called.append(self._name)
            return OneVolume() if self._name == "get_controller_strategy" else {"the volume": None}

        call_one = choose  # torchstore's own way, before there is a client

    class Mesh:
        def __getattr__(self, name: str) -> Endpoint:
            return Endpoint(name)

    async def controller(store_name):
        return Mesh()

    use_async_controller()
    monkeypatch.setattr(torchstore.api, "_controller", controller)
    client = await torchstore.client("a store of this test")
    assert isinstance(client, SparingClient), (
        "torchstore.api no longer looks LocalClient up by name"
    )
    assert isinstance(client._controller, OneActor), (
        "torchstore's client keeps its controller elsewhere now"
    )
    assert await client.exists("key") and called == ["get_controller_strategy", "locate_volumes"]


def test_the_volume_is_called_in_that_way_too():
    strategy = OneVolume()
    strategy.storage_volumes, strategy.volume_id_to_coord = object(), {strategy.get_client_id(): {}}
    volume, _ = strategy.select_storage_volume()
    assert isinstance(volume, OneActor), (
        "torchstore's strategy no longer asks get_storage_volume for it"
    )


async def test_an_object_is_put_and_got_by_one_call_to_the_volume_each():
    called, kept = [], InMemoryStore()

    class Endpoint:
        def __init__(self, name: str):
            self._name = name

        async def choose(self, *arguments) -> Any:
            called.append(self._name)
            return await getattr(kept, self._name)(*arguments)

    class Mesh:
        def __getattr__(self, name: str) -> Endpoint:
            return Endpoint(name)

    strategy = OneVolume()
    strategy.storage_volumes, strategy.volume_id_to_coord = Mesh(), {strategy.get_client_id(): {}}
    client = SparingClient(object(), strategy)
    for value in ({"version": 1}, {"version": 2}):
        await client.put("key", value)
        assert await client.get("key") == value
    assert called == ["put", "get"] * 2


def test_torchstores_client_is_called_with_the_same_arguments():
    put, get = [inspect.signature(getattr(SparingClient, name)) for name in ("put", "get")]
    assert list(put.parameters) == list(inspect.signature(LocalClient.put).parameters)
    assert list(get.parameters) == list(inspect.signature(LocalClient.get).parameters)


async def test_a_store_is_given_up_without_asking_its_volume():
    class Gone:
        def __getattr__(self, name):
            raise AssertionError(
                "its process has ended, and a call to it would wait for Monarch to notice"
            )

    controller = AsyncController()
    controller.storage_volumes, controller.is_initialized = Gone(), True
    await AsyncController.teardown._method(controller)
    assert not controller.is_initialized and controller.storage_volumes is None
