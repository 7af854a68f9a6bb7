"""Speed up an engine's start: do not import the parts of torch and transformers that serving never uses.

transformers imports torch's compiler only for its decorators. If torch supports distributed training,
transformers also imports everything for that. Both cost as much CPU time as torch itself. Call these
functions before transformers is imported, and only in a process that serves a model.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
MARKS = ("allow_in_graph", "assume_constant_result", "disable")


def defer_compiler() -> None:
    """Delay the import of `torch._dynamo` until something uses more of it than its decorators."""
    spec = importlib.util.find_spec(COMPILER)
    if COMPILER in sys.modules or spec is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Deferred
    for name in MARKS:
        setattr(module, name, _unmarked)
    sys.modules[COMPILER] = module
    torch._dynamo = module
    # transformers imports this submodule, which needs nothing else of the package. Other submodules need the
    # whole package. The import system reads the package's `__path__` before it imports them, so deleting
    # `__path__` makes `_Deferred` load the package then.
    with contextlib.suppress(ImportError):
        importlib.import_module(f"{COMPILER}._trace_wrapped_higher_order_op")
    if isinstance(module, _Deferred):
        del module.__path__


def disable_distributed() -> None:
    """Make transformers treat torch as built without `torch.distributed`, for a model on one rank."""
    torch.distributed.is_available = lambda: False


class _Deferred(ModuleType):
    """A package that is loaded when an attribute is missing; from then on it is a plain module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        for mark in MARKS:
            delattr(self, mark)
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__class__ = ModuleType  # type: ignore[assignment]  # it was created as a ModuleType
        spec.loader.exec_module(self)
        return getattr(self, name)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing: the mark is only for torch.compile."""
    return (lambda each: each) if function is None else function
