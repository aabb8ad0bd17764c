"""In every program that tests start: halves what importing torch and TensorDict costs.

They make half a million objects that stay. The garbage collector does not look through them while they are made, nor
when the program ends. conftest.py does the same for the tests' own process, and names this folder to its children.
"""

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class Frozen(PathFinder):
    """Finds libraries whose objects the garbage collector is to leave alone."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in ("torch", "tensordict"):
            return None  # the next finder's
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                gc.disable()
                try:
                    execute(module)
                    gc.freeze()
                finally:
                    gc.enable()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Frozen)
