"""Run csrc/cpu, compiled for ARM, in an emulated ARM processor inside this process.

The emulator is Unicorn. The emulated program runs without an operating system; bare.cpp has the few library
functions that the program needs. Memory of this process that the program touches is mapped at the same
address for the call. So tensors are passed directly, through the library's C interface. As a pytest plug-in
(`-p tests.kernels.arm`), this module replaces the loader for libraries that are compiled for ARM.

Unicorn supports NEON and products of bytes. It lacks products of bfloat16 and of mixed signs (BF16, I8MM).
This module executes those in Python, as the ARM manual describes them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import unicorn
from unicorn import arm64_const as arm
from unicorn.unicorn import Uc

AARCH64 = 183  # the machine number in an ELF header
CALLED_FROM = 0xF000000000  # the return address of calls
STACK, STACK_BYTES = 0xF100000000, 1 << 20
THREAD, THREAD_BYTES = 0xF200000000, 1 << 20
HWCAP = (1 << 20, 1 << 13 | 1 << 14)  # HWCAP: products of bytes; HWCAP2: I8MM and BF16
LOADED, THREAD_LOCAL = 1, 7  # ELF segment types
PAGE = 4096


class Program:
    """A bare program, and the processor that runs its functions."""

    def __init__(self, path: Path) -> None:
        self._machine = Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._machine.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
        image = path.read_bytes()
        self._symbols = dict(_symbols(image))
        for kind, offset, address, size, size_in_memory in _segments(image):
            if kind == LOADED:
                first = address // PAGE * PAGE
                bytes_mapped = -(-(address + size_in_memory - first) // PAGE) * PAGE
                self._machine.mem_map(first, bytes_mapped)
                self._machine.mem_write(address, image[offset : offset + size])
        for address, size in (
            (CALLED_FROM, PAGE),
            (STACK, STACK_BYTES),
            (THREAD, THREAD_BYTES),
        ):
            self._machine.mem_map(address, size)
        self._machine.reg_write(arm.UC_ARM64_REG_TPIDR_EL0, THREAD)
        self._machine.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # enable floating point
        self._machine.hook_add(unicorn.UC_HOOK_MEM_UNMAPPED, self._lend)
        self._machine.hook_add(unicorn.UC_HOOK_INTR, self._interrupted)
        self._lent: list[tuple[int, int]] = []
        self.carried_out = 0  # instructions that were executed in Python
        self.write_words("features", HWCAP)

    def write_words(self, name: str, words: tuple[int, ...]) -> None:
        self._machine.mem_write(self._symbols[name], struct.pack(f"<{len(words)}Q", *words))

    def text_at(self, address: int) -> bytes:
        found = b""
        while not found.endswith(b"\0"):
            found += self._machine.mem_read(address + len(found), 1)
        return found[:-1]

    def call(self, name: str, whole: list[int], floats: list[float]) -> int:
        """Call a function by ARM's convention: eight integers in registers, the others on the stack."""
        self.write_words("taken", (0,))
        self._machine.mem_write(THREAD, bytes(THREAD_BYTES))  # each call counts as a new thread
        for i, value in enumerate(whole[:8]):
            self._machine.reg_write(arm.UC_ARM64_REG_X0 + i, value)
        for i, number in enumerate(floats):
            (bits,) = struct.unpack("<I", struct.pack("<f", number))
            self._machine.reg_write(arm.UC_ARM64_REG_S0 + i, bits)
        behind = struct.pack(f"<{len(whole[8:])}Q", *whole[8:])
        top = STACK + STACK_BYTES - 64 - len(behind) // 16 * 16 - 16
        self._machine.mem_write(top, behind)
        self._machine.reg_write(arm.UC_ARM64_REG_SP, top)
        self._machine.reg_write(arm.UC_ARM64_REG_X30, CALLED_FROM)
        try:
            self._machine.emu_start(self._symbols[name], CALLED_FROM)
        finally:
            for first, size in self._lent:
                self._machine.mem_unmap(first, size)
            self._lent.clear()
        return int(self._machine.reg_read(arm.UC_ARM64_REG_X0))

    def _lend(
        self, machine: Uc, _kind: int, address: int, _size: int, _value: int, _data: object
    ) -> bool:
        """Map the range of this process's memory that contains the address. Return False if there is none."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            limits, rights = line.split()[:2]
            first, end = (int(each, 16) for each in limits.split("-"))
            if first <= address < end and rights.startswith("r"):
                allowed = unicorn.UC_PROT_READ | ("w" in rights and unicorn.UC_PROT_WRITE)
                machine.mem_map_ptr(first, end - first, allowed, ctypes.c_void_p(first))
                self._lent.append((first, end - first))
                return True
        return False

    def _interrupted(self, machine: Uc, _number: int, _data: object) -> None:
        at = machine.reg_read(arm.UC_ARM64_REG_PC)
        (word,) = struct.unpack("<I", machine.mem_read(at, 4))
        act = INSTRUCTIONS.get(word & 0xFFE0FC00)
        if act is None:
            machine.emu_stop()
            raise RuntimeError(f"the processor stopped at {at:#x}, instruction {word:#010x}")
        target, left, right = word & 31, word >> 5 & 31, word >> 16 & 31
        vectors = [
            machine.reg_read(arm.UC_ARM64_REG_V0 + i).to_bytes(16, "little")
            for i in (target, left, right)
        ]
        result = int.from_bytes(act(*vectors), "little")
        machine.reg_write(arm.UC_ARM64_REG_V0 + target, result)
        machine.reg_write(arm.UC_ARM64_REG_PC, at + 4)
        self.carried_out += 1


def _bfdot(sums: bytes, left: bytes, right: bytes) -> bytes:
    """Add two products of bfloat16 to each float."""
    a, b = ((np.frombuffer(each, "<u2").astype("<u4") << 16).view("<f4") for each in (left, right))
    products = a * b
    total: np.ndarray[Any, Any] = np.frombuffer(sums, "<f4") + (products[::2] + products[1::2])
    return total.tobytes()


def _usdot(sums: bytes, left: bytes, right: bytes) -> bytes:
    """Add four products of an unsigned and a signed byte to each integer."""
    products = np.frombuffer(left, "u1").astype("<i4") * np.frombuffer(right, "i1")
    total: np.ndarray[Any, Any] = np.frombuffer(sums, "<i4") + products.reshape(4, 4).sum(1)
    return total.astype("<i4").tobytes()


INSTRUCTIONS = {0x6E40FC00: _bfdot, 0x4E809C00: _usdot}  # fixed bits of instructions on 16 bytes


def _segments(image: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield type, offset in the file, address, size in the file and size in memory of each segment."""
    (offset,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for i in range(count):
        kind, _, start, address, _, in_file, in_memory, _ = struct.unpack_from(
            "<IIQQQQQQ", image, offset + i * size
        )
        yield kind, start, address, in_file, in_memory


def _symbols(image: bytes) -> Iterator[tuple[str, int]]:
    (offset,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
    for _, kind, _, _, start, length, link, _, _, each in sections:
        if kind == 2:  # the symbol table
            names = sections[link][4]
            for at in range(start, start + length, each):
                name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", image, at)
                yield image[names + name : image.index(b"\0", names + name)].decode(), value


class Function:
    """A function of the program, with the interface of a ctypes function."""

    argtypes: tuple[Any, ...] = ()
    restype: Any = None

    def __init__(self, program: Program, name: str) -> None:
        self._program = program
        self._name = name

    def __call__(self, *given: Any) -> Any:
        whole: list[int] = []
        floats: list[float] = []
        kept = []
        for kind, value in zip(self.argtypes, given, strict=True):
            if kind is ctypes.c_float:
                floats.append(value)
            elif kind is ctypes.c_char_p:
                kept.append(ctypes.create_string_buffer(value))
                whole.append(ctypes.addressof(kept[-1]))
            elif isinstance(value, int):
                whole.append(value % (1 << 64))
            else:  # None, or a result of byref
                whole.append(0 if value is None else ctypes.addressof(value._obj))
        answer = self._program.call(self._name, whole, floats)
        if self.restype is ctypes.c_char_p:
            return self._program.text_at(answer) if answer else None
        return None if self.restype is None else ctypes.c_int32(answer).value


class Library:
    """Replaces ctypes.CDLL."""

    def __init__(self, path: Path) -> None:
        self._program = Program(path)

    def __getattr__(self, name: str) -> Function:
        if name not in self._program._symbols:
            raise AttributeError(name)
        made = Function(self._program, name)
        setattr(self, name, made)  # keep the function, because callers set its argtypes
        return made


def pytest_configure() -> None:
    """Make ctypes load ARM libraries into the emulator, and all other libraries as usual."""
    load = ctypes.CDLL

    def loaded(name: str | None, *arguments: Any, **options: Any) -> Any:
        if name is not None and Path(name).is_file() and machine_of(Path(name)) == AARCH64:
            return Library(Path(name))
        return load(name, *arguments, **options)

    ctypes.CDLL = loaded  # type: ignore[assignment,misc]


def machine_of(path: Path) -> int:
    with path.open("rb") as file:
        return int(struct.unpack_from("<H", file.read(20), 18)[0])
