"""What this library takes from inside torchstore."""

import inspect

import torchstore.api
import torchstore.controller

from torchtitan.experiments.rl.compat.torchstore import AsyncController, use_async_controller


def endpoints_of(actor: type) -> dict[str, object]:
    return {name: getattr(actor, name) for name in dir(actor) if hasattr(getattr(actor, name), "_method")}


def test_every_endpoint_of_torchstores_controller_is_async_here():
    theirs, ours = endpoints_of(torchstore.controller.Controller), endpoints_of(AsyncController)
    assert theirs.keys() == ours.keys() and theirs, "Monarch's endpoints no longer keep their function in _method"
    kept_sync = [name for name, endpoint in ours.items() if not inspect.iscoroutinefunction(endpoint._method)]
    assert not kept_sync, f"torchstore has new sync endpoints, which AsyncController has to override: {kept_sync}"


def test_overridden_endpoints_take_the_same_arguments_as_torchstores():
    for name, endpoint in endpoints_of(AsyncController).items():
        theirs = inspect.signature(getattr(torchstore.controller.Controller, name)._method)
        ours = inspect.signature(endpoint._method)
        assert list(ours.parameters) == list(theirs.parameters), f"torchstore's {name} has other arguments now"


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
    assert "Controller" in torchstore.api._controller.__code__.co_names, "torchstore.api no longer looks Controller up by name"


async def test_a_store_is_given_up_without_asking_its_volume():
    class Gone:
        def __getattr__(self, name):
            raise AssertionError("its process has ended, and a call to it would wait for Monarch to notice")

    controller = AsyncController()
    controller.storage_volumes, controller.is_initialized = Gone(), True
    await AsyncController.teardown._method(controller)
    assert not controller.is_initialized and controller.storage_volumes is None
