"""The driver, of which only its presence is asked."""

from typing import Any, NoReturn

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Driver that is there, and runs nothing: the interpreter does."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError

    def get_current_target(self) -> NoReturn:
        raise NotImplementedError

    def get_active_torch_device(self) -> NoReturn:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError
