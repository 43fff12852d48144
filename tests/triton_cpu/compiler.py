"""The compiler, which Triton wants beside a driver."""

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):
    """Compiler that takes no target."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> NoReturn:
        raise NotImplementedError

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> NoReturn:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> NoReturn:
        raise NotImplementedError

    def get_module_map(self) -> NoReturn:
        raise NotImplementedError
