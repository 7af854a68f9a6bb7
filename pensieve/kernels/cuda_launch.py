"""Puts a kernel of csrc/cuda onto torch's current stream of a GPU.

A `Launch` says which kernel, how many blocks of how many threads, and which arguments.  It is a plain value
made without a GPU, so the tests carry the same launch out on a CPU.  `launch` does it on the GPU: the code
comes from `nvrtc`, is loaded once per device, and a CUDA graph captures it like any operation of torch.
Nothing is allocated, waited for or read back.

Tensors go over as addresses and strides, so nothing depends on the layout of torch's or CuPy's objects.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from pensieve.errors import DeviceError
from pensieve.kernels import nvrtc
from pensieve.kernels.nvrtc import Kernel

CAN_USE_HOST_POINTERS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem

Argument = tuple[Literal["p", "i", "l", "f"], float]  # pointer, int32, int64, float


class Launch(NamedTuple):
    kernel: Kernel
    num_blocks: int
    num_threads: int
    arguments: tuple[Argument, ...]
    shared: str = ""  # the constant of the source that says how much dynamic shared memory it needs


def pointers(*tensors: torch.Tensor) -> tuple[Argument, ...]:
    return tuple(("p", tensor.data_ptr()) for tensor in tensors)


def launch(wanted: Launch, device: torch.device) -> None:
    """Launch the kernel on torch's current stream of that device."""
    if not wanted.num_blocks:
        return
    index = device.index or 0
    function, shared_bytes = _loaded(wanted.kernel, wanted.shared, index)
    arguments = converted(wanted.arguments)
    # What torch's own compiler asks for the stream: its class `Stream` costs more than a launch.
    stream = _Stream(torch._C._cuda_getCurrentRawStream(index))
    sizes = ((wanted.num_blocks,), (wanted.num_threads,))
    if torch.cuda.current_device() == index:
        function(*sizes, arguments, shared_mem=shared_bytes, stream=stream)
        return
    with torch.cuda.device(index):
        function(*sizes, arguments, shared_mem=shared_bytes, stream=stream)


def converted(arguments: tuple[Argument, ...]) -> list[Any]:
    """As CuPy takes them.

    Most come again in every layer and iteration, and to find one is much faster than to make it.  Several
    threads launch, and one may forget what another has just made: that one returns what it made.
    """
    try:
        return [_converted[each] for each in arguments]
    except KeyError:
        pass
    import cupy

    if len(_converted) > CONVERTED_MAX:
        _converted.clear()
    made = [getattr(cupy, TYPES[kind])(value) for kind, value in arguments]
    _converted.update(zip(arguments, made, strict=True))
    return made


TYPES = {"p": "uint64", "i": "int32", "l": "int64", "f": "float32"}
CONVERTED_MAX = 10_000
_converted: dict[Argument, Any] = {}


class _Stream(NamedTuple):
    """Torch's stream, as CuPy takes one."""

    ptr: int


def prepare(device_index: int) -> None:
    """Load one kernel, so that a device without kernels raises DeviceError before a model is loaded."""
    _loaded(Kernel("copy_pages.cu", "copy_pages"), "", device_index)
    import cupy

    if not cupy.cuda.runtime.deviceGetAttribute(CAN_USE_HOST_POINTERS, device_index):
        raise DeviceError("this machine gives page-locked memory other addresses on its GPU")


@cache
def _loaded(kernel: Kernel, shared: str, device_index: int) -> tuple[Any, int]:
    """The function on that device, and the dynamic shared memory that it needs."""
    import cupy

    path = nvrtc.cubin(kernel, architecture(device_index))
    try:
        with torch.cuda.device(device_index):
            module = cupy.RawModule(path=str(path))
            function = module.get_function(kernel.name)
            shared_bytes = 0
            if shared:
                constant = cupy.ndarray((1,), dtype=cupy.int32, memptr=module.get_global(shared))
                shared_bytes = int(constant[0])
                function.max_dynamic_shared_size_bytes = shared_bytes
                function.preferred_shared_memory_carveout = 100
            return function, shared_bytes
    except Exception as error:  # of CuPy's own classes: a driver that is too old, no memory
        raise DeviceError(f"{kernel.name} cannot be loaded from {path}: {error}") from error


def architecture(device_index: int = 0) -> str:
    """The architecture to compile for; sm_90a has the instructions that only Hopper knows."""
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) < (8, 0):
        name = torch.cuda.get_device_name(device_index)
        raise DeviceError(f"{name} is of compute capability {major}.{minor}; 8.0 is needed")
    if (major, minor) == (9, 0):
        return "sm_90a"
    # Code for the first member of a generation runs on all of them, and any compiler for one knows the first.
    return f"sm_{major}0" if major >= 10 else f"sm_{major}{minor}"


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # of a GPU that is emulated
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
