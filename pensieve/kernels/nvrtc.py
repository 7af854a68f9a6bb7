"""Compile the kernels of csrc/cuda with NVRTC, and cache the results.

Compiling needs CuPy and NVRTC, but no GPU.

A kernel's code (a cubin) is taken from, in this order:

1. the package (`scripts/build_cubins` adds it before a wheel is made);
2. this user's cache, $XDG_CACHE_HOME/pensieve/cubin;
3. the compiler, which takes a second or two; the result goes to the cache.

A file's name is `key-digest.cubin`.  The key is the SHA-256 of everything that the code depends on: the
source and every header, the definitions, the architecture and the options.  For files in the cache, the key
also depends on the version of the compiler.  The digest is the SHA-256 of the file's content.  A file
whose content has another digest is not used.

Concurrent processes are safe: a file is written under another name and then renamed, so it is complete when
it appears.  While one process compiles a key, other processes that need the key wait for its lock.  The cache
folder must belong to this user and be writable for no other user, because its files run on the device.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.errors import DeviceError

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a")
OPTIONS = ("-std=c++17",)
SHIPPED = Path(__file__).parent / "cubin"


class Kernel(NamedTuple):
    """One function of one source, compiled with these definitions."""

    source: str  # a file of csrc/cuda
    name: str
    defines: tuple[str, ...] = ()


def cubin(kernel: Kernel, architecture: str) -> Path:
    """Return a file with the kernel's code, compiling it if necessary."""
    found = shipped(kernel, architecture)
    if found is not None:
        return found
    version = compiler_version()
    key = key_of(kernel, architecture, version)
    folder = cache_folder()
    found = stored(folder, key)
    if found is not None:
        return found
    with _lock(folder / f"{key}.lock"):
        return stored(folder, key) or store(folder, key, compiled(kernel, architecture))


def shipped(kernel: Kernel, architecture: str) -> Path | None:
    return stored(SHIPPED, key_of(kernel, architecture, "shipped"))


def key_of(kernel: Kernel, architecture: str, version: str) -> str:
    """Return the key; the kernel's name is left out, because a file has all functions of a source."""
    digest = hashlib.sha256()
    for part in (version, architecture, *OPTIONS, "", *sorted(kernel.defines), ""):
        digest.update(part.encode() + b"\0")
    digest.update(_headers())
    digest.update((sources() / "cuda" / kernel.source).read_bytes())
    return digest.hexdigest()


@cache
def sources() -> Path:
    """Return the folder csrc: next to this file in a wheel, at the top of a checkout."""
    for folder in (Path(__file__).parent / "csrc", Path(__file__).parents[2] / "csrc"):
        if (folder / "cuda").is_dir():
            return folder
    raise DeviceError("the sources of the CUDA kernels (csrc/cuda) are missing: reinstall pensieve")


@cache
def _headers() -> bytes:
    digest = hashlib.sha256()
    for path in sorted((sources() / "include").glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


# -- the compiler --


def compiled(kernel: Kernel, architecture: str) -> bytes:
    """Compile the kernel and return its code."""
    nvrtc = _nvrtc()
    source = (sources() / "cuda" / kernel.source).read_text(encoding="utf-8")
    options = (
        *OPTIONS,
        f"--gpu-architecture={architecture}",
        *(f"-D{define}" for define in kernel.defines),
        f"-I{sources() / 'include'}",
    )
    program = nvrtc.createProgram(source, kernel.source, (), ())
    try:
        nvrtc.compileProgram(program, options)
        code = whole(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = str(nvrtc.getProgramLog(program)).strip()
        raise DeviceError(
            f"{kernel.source} does not compile for {architecture} with NVRTC "
            f"{compiler_version()}: {log or error}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
    return code


def whole(code: bytes) -> bytes:
    """Pad the ELF file to the length in its header: CuPy drops the last byte, a zero."""
    (program_offset, section_offset) = struct.unpack_from("<QQ", code, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", code, 54)
    end = max(
        program_offset + program_size * program_count, section_offset + section_size * section_count
    )
    return code.ljust(end, b"\0")


@cache
def compiler_version() -> str:
    nvrtc = _nvrtc()
    try:
        return ".".join(str(part) for part in nvrtc.getVersion())
    except Exception as error:  # CuPy's own classes: the library is missing or wrong
        raise DeviceError(
            f"CuPy cannot find NVRTC to compile the kernels: {error}. Install "
            "nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12"
        ) from error


def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc
    except Exception as error:
        raise DeviceError(
            "the CUDA kernels need CuPy. Install the extra cuda13, or cuda12 if torch "
            f"was built for CUDA 12 ({type(error).__name__}: {error})"
        ) from error
    return nvrtc


# -- files --


def cache_folder() -> Path:
    """Return the user's folder of compiled kernels; create it, or refuse it if others may write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "pensieve" / "cubin"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise DeviceError(
            f"cannot store compiled kernels in {folder}: {error.strerror}. "
            "Set XDG_CACHE_HOME to another folder"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise DeviceError(
            f"other users can write to {folder}, and code from it would run on the device. "
            "Make the folder yours alone (chown, chmod 700), or set XDG_CACHE_HOME"
        )
    return folder


def stored(folder: Path, key: str) -> Path | None:
    """Return the key's file whose content matches its digest, or None."""
    for path in sorted(folder.glob(f"{key}-*.cubin")):
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
        if path.stem == f"{key}-{digest}":
            return path
    return None


def store(folder: Path, key: str, code: bytes) -> Path:
    path = folder / f"{key}-{hashlib.sha256(code).hexdigest()}.cubin"
    for damaged in folder.glob(f"{key}-*.cubin"):  # an intact file would have been used
        damaged.unlink(missing_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise DeviceError(f"cannot store a compiled kernel in {folder}: {error}") from error
    return path


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


# -- shipping --


# Definitions that choices.py may add for a source; compiled in advance only on request.
CHOSEN = {"multi_token_attention_hopper.cu": (("WATCHDOG",),)}
FP8 = ("STORED=E4m3",)  # keys and values are stored as bytes
READING_KV = ("multi_token_attention.cu", "write_kv.cu")


def variants(architectures: Sequence[str], *, chosen: bool = False) -> Iterator[tuple[Kernel, str]]:
    """Yield every source with every element and head size that it is compiled for, by architecture.

    With `chosen`, also yield the variants with the definitions in `CHOSEN`.
    """
    for source in sorted(path.name for path in (sources() / "cuda").glob("*.cu")):
        for architecture in architectures:
            if "hopper" in source and architecture != "sm_90a":
                continue
            if source in ("copy_pages.cu", "draw_tokens.cu"):
                yield Kernel(source, ""), architecture
                continue
            if source == "fused_rows.cu":
                for element in ("Bf16", "Fp16"):
                    yield Kernel(source, "", (f"ELEMENT={element}",)), architecture
                continue
            for head_size in (64, 128) if "hopper" in source else (64, 96, 128, 256):
                for element in ("Bf16", "Fp16"):
                    for stored in ((), FP8) if source in READING_KV else ((),):
                        defines = (f"HEAD_SIZE={head_size}", f"ELEMENT={element}", *stored)
                        yield Kernel(source, "", defines), architecture
                        for more in CHOSEN.get(source, ()) if chosen else ():
                            yield Kernel(source, "", defines + more), architecture


def main(architectures: Sequence[str] = ARCHITECTURES, *, chosen: bool = False) -> int:
    """Compile the missing kernels into `SHIPPED`."""
    SHIPPED.mkdir(exist_ok=True)
    wanted = list(variants(architectures, chosen=chosen))
    for number, (kernel, architecture) in enumerate(wanted, 1):
        if shipped(kernel, architecture) is None:
            key = key_of(kernel, architecture, "shipped")
            store(SHIPPED, key, compiled(kernel, architecture))
        print(f"{number}/{len(wanted)} {kernel.source} {' '.join(kernel.defines)} {architecture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
