"""Compile every CUDA kernel without a GPU, and check that the expected instructions are in it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pensieve.errors import DeviceError
from pensieve.kernels import nvrtc
from pensieve.kernels.nvrtc import ARCHITECTURES, Kernel
from tests.compiled import FOLDER

SHAPES = [(element, head_size) for element in ("Bf16", "Fp16") for head_size in (64, 96, 128, 256)]
SOURCES = sorted(path.name for path in (nvrtc.sources() / "cuda").glob("*.cu"))
HOPPER = "multi_token_attention_hopper.cu"
COMPILED = [
    (source, architecture)
    for source in SOURCES
    for architecture in (ARCHITECTURES if source != HOPPER else ("sm_90a",))
]
REGISTERS_MAX = {
    "multi_token_attention.cu": 255,
    HOPPER: 168,
    "draw_tokens.cu": 128,
}  # other sources: 64
EXPECTED = {
    "multi_token_attention.cu": ("HMMA.16816.F32", "LDGSTS", "LDSM.16.MT88", "MUFU.EX2"),
    "draw_tokens.cu": ("ATOMS.ADD", "DFMA"),
    HOPPER: ("HGMMA.64x128x16.F32", ".tnspB", "UTMALDG.3D", "SYNCS.PHASECHK", "USETMAXREG"),
}


@pytest.fixture(autouse=True)
def _tests_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep compiled kernels from run to run."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(FOLDER))


@pytest.fixture
def own_cache(_tests_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pensieve" / "cubin"


def dump(path: Path, option: str) -> str:
    from importlib.metadata import files

    tool = next(
        Path(str(each.locate()))
        for each in files("nvidia-cuda-cuobjdump") or ()
        if each.name == "cuobjdump"
    )
    return subprocess.run([tool, option, path], check=True, capture_output=True, text=True).stdout


def kernel_of(source: str, element: str = "Bf16", head_size: int = 128) -> Kernel:
    return Kernel(source, "", (f"ELEMENT={element}", f"HEAD_SIZE={head_size}"))


def examine(
    source: str, architecture: str, element: str, head_size: int, *, fp8: bool = False
) -> None:
    kernel = kernel_of(source, element, head_size)
    if fp8:
        kernel = kernel._replace(defines=kernel.defines + nvrtc.FP8)
    path = nvrtc.cubin(kernel, architecture)
    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", dump(path, "-res-usage")
    )
    assert usage, "the kernel file has no function"
    for name, registers, stack, local in usage:
        assert int(registers) <= REGISTERS_MAX.get(source, 64), (name, registers)
        assert (int(stack), int(local)) == (0, 0), f"{name} spills"
    sass = dump(path, "-sass")
    for instruction in EXPECTED.get(source, ()):
        assert instruction in sass, f"no {instruction} in {source} for {architecture}"


@pytest.mark.parametrize(
    ("source", "architecture"),
    [
        # sm_86 has the instructions of sm_80 and the registers of sm_89.
        pytest.param(*each, marks=pytest.mark.full if each[1] == "sm_86" else ())
        for each in COMPILED
    ],
)
def test_each_kernel_compiles_without_spills_to_the_instructions_it_needs(
    source: str, architecture: str
) -> None:
    examine(source, architecture, "Bf16", 128)


@pytest.mark.parametrize(
    ("source", "architecture"),
    [(source, each) for source in nvrtc.READING_KV for each in ("sm_80", "sm_90a")],
)
def test_fp8_kernels_compile_without_spills(source: str, architecture: str) -> None:
    examine(source, architecture, "Bf16", 128, fp8=True)


@pytest.mark.full
@pytest.mark.parametrize("source", nvrtc.READING_KV)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("element", "head_size"), SHAPES)
def test_fp8_kernels_of_every_element_and_head_size_compile_without_spills(
    source: str, architecture: str, element: str, head_size: int
) -> None:
    examine(source, architecture, element, head_size, fp8=True)


@pytest.mark.full
@pytest.mark.parametrize(("source", "architecture"), COMPILED)
@pytest.mark.parametrize(("element", "head_size"), SHAPES)
def test_kernels_of_every_element_and_head_size_compile_without_spills(
    source: str, architecture: str, element: str, head_size: int
) -> None:
    if source == HOPPER and head_size not in (64, 128):
        pytest.skip("Hopper's kernel is for head sizes 64 and 128")
    examine(source, architecture, element, head_size)


@pytest.mark.parametrize("head_size", [64, 128])
def test_hoppers_products_overlap(head_size: int) -> None:
    """The value products of one stage must overlap with the exponentials of the next stage's scores.

    ptxas serializes products whose registers it cannot track, and may move waits earlier. This test would
    notice both.
    """
    sass = dump(nvrtc.cubin(kernel_of(HOPPER, head_size=head_size), "sm_90a"), "-sass")
    told = re.findall(r"HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d", sass)
    waits = [each for each in told if each.startswith("W")]
    assert told.count("HGMMA") == 2 * (head_size // 16 + 8), (
        "two products with keys, two with values"
    )
    assert len(waits) == 4
    under_way = next(i for i, each in enumerate(told) if each.endswith("0x1"))
    done = next(i for i in range(under_way + 1, len(told)) if told[i].endswith("0x0"))
    assert told[under_way + 1 : done] == ["MUFU.EX2"] * 66, "64 powers and two corrections"


def test_under_the_watchdog_a_wait_that_never_ends_traps() -> None:
    plain = kernel_of(HOPPER)
    watched = plain._replace(defines=(*plain.defines, "WATCHDOG"))
    assert "BPT.TRAP" not in dump(nvrtc.cubin(plain, "sm_90a"), "-sass")
    sass = dump(nvrtc.cubin(watched, "sm_90a"), "-sass")
    assert sass.count("BPT.TRAP") == sass.count("SYNCS.PHASECHK") // 2, (
        "one for each place that waits"
    )


def test_all_variants_for_one_architecture_can_be_compiled_beforehand() -> None:
    """Compile for one architecture, with every definition that a choice may add."""
    found = list(nvrtc.variants(("sm_90a",), chosen=True))
    assert len(set(found)) == len(found)
    assert {architecture for _, architecture in found} == {"sm_90a"}
    defines = {frozenset(kernel.defines) for kernel, _ in found if kernel.source == HOPPER}
    assert frozenset(("HEAD_SIZE=128", "ELEMENT=Bf16", "WATCHDOG")) in defines


def test_parts_are_merged_sixteen_bytes_at_a_time() -> None:
    sass = dump(nvrtc.cubin(kernel_of("merge_parts.cu"), "sm_90a"), "-sass")
    loops = re.findall(r"LDG\.E\.128", sass)
    assert len(loops) >= 4, "the loads of four parts are under way together"
    assert "STG.E.64" in sass


def test_rows_are_rotated_eight_bytes_at_a_time() -> None:
    sass = dump(nvrtc.cubin(kernel_of("write_kv.cu"), "sm_90a"), "-sass")
    rotating = sass[sass.index("Function : rotate_and_write_kv") :].partition(
        "Function : write_kv"
    )[0]
    assert rotating.count("LDG.E.64") >= 6, "two parts of a row, with their cosines and sines"
    assert rotating.count("STG.E.64") >= 2


def test_pages_are_copied_sixteen_bytes_at_a_time() -> None:
    sass = dump(nvrtc.cubin(kernel_of("copy_pages.cu"), "sm_80"), "-sass")
    assert "LDG.E.128" in sass
    assert "STG.E.128" in sass


# -- the cache folder --


def test_compiled_kernels_are_cached(own_cache: Path) -> None:
    first = nvrtc.cubin(kernel_of("write_kv.cu"), "sm_80")
    written = first.stat().st_mtime_ns
    assert first.parent == own_cache
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    assert nvrtc.cubin(kernel_of("write_kv.cu"), "sm_80") == first
    assert first.stat().st_mtime_ns == written
    others = {
        nvrtc.cubin(kernel_of("write_kv.cu"), "sm_86"),
        nvrtc.cubin(kernel_of("write_kv.cu", head_size=64), "sm_80"),
        nvrtc.cubin(kernel_of("write_kv.cu", element="Fp16"), "sm_80"),
    }
    assert len(others | {first}) == 4


def test_a_damaged_cache_file_is_compiled_again(own_cache: Path) -> None:
    path = nvrtc.cubin(kernel_of("write_kv.cu"), "sm_80")
    code = path.read_bytes()
    path.write_bytes(code[:-1] + bytes([code[-1] ^ 1]))
    again = nvrtc.cubin(kernel_of("write_kv.cu"), "sm_80")
    assert again.read_bytes() == code
    assert [each.suffix for each in own_cache.iterdir()].count(".cubin") == 1


def test_a_changed_header_or_compiler_changes_the_cache_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = nvrtc.key_of(kernel_of("write_kv.cu"), "sm_80", "13.0")
    assert before != nvrtc.key_of(kernel_of("write_kv.cu"), "sm_80", "13.5")
    monkeypatch.setattr(nvrtc, "_headers", lambda: b"others")
    assert before != nvrtc.key_of(kernel_of("write_kv.cu"), "sm_80", "13.0")


def test_shipped_kernels_are_used_before_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of("write_kv.cu")
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(nvrtc, "SHIPPED", folder)
    path = nvrtc.store(folder, nvrtc.key_of(kernel, "sm_80", "shipped"), b"code")
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: pytest.fail("asked the compiler"))
    assert nvrtc.cubin(kernel, "sm_80") == path


def test_a_cache_folder_that_others_may_write_to_is_refused(own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    with pytest.raises(DeviceError, match="yours alone"):
        nvrtc.cubin(kernel_of("write_kv.cu"), "sm_80")


def test_the_error_names_a_cache_folder_that_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="XDG_CACHE_HOME"):
        nvrtc.cubin(kernel_of("write_kv.cu"), "sm_80")


def test_a_compile_error_names_the_source_and_the_problem(own_cache: Path) -> None:
    with pytest.raises(DeviceError, match=r"write_kv.cu does not compile for sm_80 .*Nothing"):
        nvrtc.cubin(Kernel("write_kv.cu", "", ("ELEMENT=Nothing",)), "sm_80")
    assert not list(own_cache.glob("*.cubin"))


def test_without_cupy_the_error_names_the_package_to_install(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('not here')")
    program = (
        "from pensieve.kernels import nvrtc\n"
        "from pensieve.errors import DeviceError\n"
        "try: nvrtc.cubin(nvrtc.Kernel('write_kv.cu', ''), 'sm_80')\n"
        "except DeviceError as error: print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "CuPy. Install the extra cuda13, or cuda12 if torch" in told


def test_threads_that_need_the_same_kernel_compile_it_once(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []
    compiled = nvrtc.compiled

    def counted(kernel: Kernel, architecture: str) -> bytes:
        times.append(kernel)
        return compiled(kernel, architecture)

    monkeypatch.setattr(nvrtc, "compiled", counted)
    threads = [
        threading.Thread(target=nvrtc.cubin, args=(kernel_of("merge_parts.cu"), "sm_80"))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(times) == 1
    assert len(list(own_cache.glob("*.cubin"))) == 1
