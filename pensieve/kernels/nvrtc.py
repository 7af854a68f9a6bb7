"""Compiles the kernels of csrc/cuda with NVRTC, and keeps what it compiled in a cache.

Compiling needs CuPy and NVRTC, but no GPU.

Where a kernel's code (a cubin) comes from, in this order:

1. shipped with the package (`scripts/build_cubins` puts it there before a wheel is made);
2. this user's cache, $XDG_CACHE_HOME/pensieve/cubin;
3. compiled now, which takes a second or two, and kept in the cache.

A file's name is `key-digest.cubin`.  The key is the SHA-256 of everything that the code depends on: the
source and every header, the definitions, the architecture, the options, and for the cache the version of
the compiler.  The digest is the SHA-256 of the file's content; a file whose content has another is not used.

Why processes do not disturb each other: a file is written under another name and then renamed, so it is
complete when it appears; and while one process compiles a key, others that need it wait at its lock.  The
cache folder has to belong to this user, and no other user may write to it: its files run on the device.
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
    """A file with the kernel's code."""
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
    """The name is left out: all functions of a source lie in one file."""
    digest = hashlib.sha256()
    for part in (version, architecture, *OPTIONS, "", *sorted(kernel.defines), ""):
        digest.update(part.encode() + b"\0")
    digest.update(_headers())
    digest.update((sources() / "cuda" / kernel.source).read_bytes())
    return digest.hexdigest()


@cache
def sources() -> Path:
    """csrc: beside this file in a wheel, at the top of a checkout."""
    for folder in (Path(__file__).parent / "csrc", Path(__file__).parents[2] / "csrc"):
        if (folder / "cuda").is_dir():
            return folder
    raise DeviceError("the sources of the CUDA kernels (csrc/cuda) are not there: broken install?")


@cache
def _headers() -> bytes:
    digest = hashlib.sha256()
    for path in sorted((sources() / "include").glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


# -- the compiler --


def compiled(kernel: Kernel, architecture: str) -> bytes:
    """The kernel's code, made now."""
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
    """The ELF file in the length that its header says: CuPy drops the last byte, a zero."""
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
    except Exception as error:  # of CuPy's own classes: no library, or a wrong one
        raise DeviceError(
            f"CuPy finds no NVRTC to compile the kernels with: {error}; install "
            "nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12"
        ) from error


def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc
    except Exception as error:
        raise DeviceError(
            "the CUDA kernels need CuPy: install the extra cuda13, or cuda12 where torch "
            f"was built for CUDA 12 ({type(error).__name__}: {error})"
        ) from error
    return nvrtc


# -- files --


def cache_folder() -> Path:
    """The user's folder of compiled kernels; made if missing, refused if others may write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "pensieve" / "cubin"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise DeviceError(
            f"compiled kernels cannot be kept in {folder}: {error.strerror}; "
            "set XDG_CACHE_HOME to another folder"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise DeviceError(
            f"{folder} belongs to another user or may be written by one, and code from it would run "
            "on the device; make it yours alone (chmod 700), or set XDG_CACHE_HOME"
        )
    return folder


def stored(folder: Path, key: str) -> Path | None:
    """The file of this key whose content still has its digest; None if there is none."""
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
    for damaged in folder.glob(f"{key}-*.cubin"):  # an intact one would have been used
        damaged.unlink(missing_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        Path(beside).unlink(missing_ok=True)
        raise DeviceError(f"a compiled kernel cannot be kept in {folder}: {error}") from error
    return path


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the lock ends with the file


# -- shipping --


# What choices.py may add to the definitions of a source; compiled beforehand where that is asked for.
CHOSEN = {"multi_token_attention_hopper.cu": (("WATCHDOG",),)}
FP8 = ("STORED=E4m3",)  # where keys and values are kept as bytes
READING_KV = ("multi_token_attention.cu", "write_kv.cu")


def variants(architectures: Sequence[str], *, chosen: bool = False) -> Iterator[tuple[Kernel, str]]:
    """Every source with every element and head size that it is compiled for, on these architectures.

    `chosen`: with every choice as well.
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
    """Compile what is not there yet into `SHIPPED`."""
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
