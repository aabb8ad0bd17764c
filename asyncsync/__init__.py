"""The weights of a model under training, delivered to every process that runs a copy of it, over asyncio and ZeroMQ.

Importing this package starts no thread, process, socket or event loop, and needs none of the optional libraries. The
first name that is used loads them all, and torch with them: :mod:`asyncsync.public`.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from pathlib import Path as _Path
from typing import TYPE_CHECKING

import numpy as _numpy  # noqa: F401  # before torch, which swallows what is raised while it imports it, such as Ctrl-C

# In a checkout `asyncsync.transports` and `asyncsync.collectors` lie beside this directory; installed, they lie in it.
# Were site-packages appended as well, a stranger's top-level `transports` there would be taken for ours.
_checkout = _Path(__file__).resolve().parent.parent
if all((_checkout / name).is_file() for name in ("pyproject.toml", "transports/__init__.py", "collectors/__init__.py")):
    __path__.append(str(_checkout))
del _checkout

try:
    __version__ = _version("asyncsync")
except _PackageNotFoundError:  # a checkout on PYTHONPATH, never installed
    __version__ = "0+unknown"

if TYPE_CHECKING:
    from asyncsync.errors import *  # noqa: F403
    from asyncsync.public import *  # noqa: F403
else:  # hidden from type checkers, which would take any name to be there

    def __getattr__(name):
        public = _import_module("asyncsync.public")
        names = {each: getattr(public, each) for each in public.__all__}
        globals().update(names, __all__=["__version__", *names])
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
