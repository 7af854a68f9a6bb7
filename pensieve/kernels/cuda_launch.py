"""Launch a kernel of csrc/cuda on torch's current stream of a GPU.

A `Launch` holds a kernel, numbers of blocks and threads, and arguments.  It is a plain value made without a
GPU, so tests can run it on a CPU.  `launch` runs it on the GPU.  `nvrtc` supplies the code, which is loaded
once per device.  A CUDA graph captures the launch like any torch operation.  `launch` allocates nothing,
waits for nothing and reads nothing back.

Tensors are passed as addresses and strides, so the layout of torch's or CuPy's objects does not matter.
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
    shared: str = ""  # name of the constant with the bytes of dynamic shared memory, if any


def pointers(*tensors: torch.Tensor) -> tuple[Argument, ...]:
    return tuple(("p", tensor.data_ptr()) for tensor in tensors)


def launch(wanted: Launch, device: torch.device) -> None:
    """Launch the kernel on torch's current stream of that device."""
    if not wanted.num_blocks:
        return
    index = device.index or 0
    function, shared_bytes = _loaded(wanted.kernel, wanted.shared, index)
    arguments = converted(wanted.arguments)
    # Torch's own compiler also gets the stream like this: making a `Stream` takes longer than a launch.
    stream = _Stream(torch._C._cuda_getCurrentRawStream(index))
    sizes = ((wanted.num_blocks,), (wanted.num_threads,))
    if torch.cuda.current_device() == index:
        function(*sizes, arguments, shared_mem=shared_bytes, stream=stream)
        return
    with torch.cuda.device(index):
        function(*sizes, arguments, shared_mem=shared_bytes, stream=stream)


def converted(arguments: tuple[Argument, ...]) -> list[Any]:
    """Convert arguments to CuPy's types, with a cache.

    Most arguments repeat in every layer and iteration, and looking a value up is much faster than making it.
    Several threads launch, and a thread may clear the cache while another adds to it.  So a call never reads
    back the values that it has added to the cache.
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
    """Wrap torch's stream for CuPy."""

    ptr: int


def prepare(device_index: int) -> None:
    """Load one kernel, so that an unsupported device raises DeviceError before a model is loaded."""
    _loaded(Kernel("copy_pages.cu", "copy_pages"), "", device_index)
    import cupy

    if not cupy.cuda.runtime.deviceGetAttribute(CAN_USE_HOST_POINTERS, device_index):
        raise DeviceError(
            "this machine's GPU cannot use the host's addresses of page-locked memory"
        )


@cache
def _loaded(kernel: Kernel, shared: str, device_index: int) -> tuple[Any, int]:
    """Return the function on that device, and the dynamic shared memory that it needs."""
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
    except Exception as error:  # CuPy's own classes, if the driver is too old or memory is short
        raise DeviceError(f"{kernel.name} cannot be loaded from {path}: {error}") from error


def architecture(device_index: int = 0) -> str:
    """Return the architecture to compile for; sm_90a has instructions that only Hopper knows."""
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) < (8, 0):
        name = torch.cuda.get_device_name(device_index)
        raise DeviceError(f"{name} has compute capability {major}.{minor}, but 8.0 is needed")
    if (major, minor) == (9, 0):
        return "sm_90a"
    # Code for the first member of a generation runs on all members, and every compiler knows the first.
    return f"sm_{major}0" if major >= 10 else f"sm_{major}{minor}"


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # for an emulated GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
