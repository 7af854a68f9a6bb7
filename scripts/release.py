"""Build everything for a release, check it, and upload it if asked.

    scripts/release              build into dist/ and check
    scripts/release --upload     the same, then upload with twine (its TWINE_* variables or ~/.pypirc)

Makes: the source distribution; wheels of `pensieve-serve` with the CPU kernels for Linux on x86-64 and ARM,
and one without them for other systems; the wheel of `pensieve-client`. Clang from the package ziglang
compiles the kernels for glibc 2.28 and newer, so no other compiler, container or ARM machine is needed.

Checks: a clean checkout, a section of this version in CHANGELOG.md, the metadata (twine), the glibc that the
wheels need (auditwheel), an installation of the wheel with the kernels of this machine, the container file
(hadolint) and the Kubernetes manifests (kubernetes-validate). --trial skips the first two.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from scripts import wheel_file

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "docs" / "deploy"
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
LIBRARY = "libpensieve_cpu.so"
LIBRARY_IN_WHEEL = f"pensieve/kernels/{LIBRARY}"
LOAD_PROGRAM = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if getattr(each, "__name__", "") in
                    {"BuiltinImporter", "FrozenImporter", "PathFinder"}]
sys.path.insert(0, sys.argv[1])
from pensieve.kernels import cpu_library
assert cpu_library.__file__.startswith(sys.argv[1]), cpu_library.__file__
assert cpu_library.compiled_library() is not None
"""


class ReleaseError(Exception):
    """A reason not to release; the message says what to do."""


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist", help="default: dist")
    parser.add_argument("--trial", action="store_true", help="build any state of the checkout")
    parser.add_argument("--upload", action="store_true", help="upload what was built and checked")
    options = parser.parse_args(given)
    if options.trial and options.upload:
        parser.error("--trial builds what must not be uploaded: leave out one of the two")
    try:
        if not options.trial:
            check_ready(ROOT, version())
        made = build(options.folder)
        check(made)
        if options.upload:
            run("twine", "upload", *map(str, made))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(path)
    return 0


def version() -> str:
    text = (ROOT / "pensieve" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def check_ready(root: Path, version: str) -> None:
    """Refuse a checkout with changes, and a version that CHANGELOG.md does not describe."""
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True
    )
    if status.stdout:
        raise ReleaseError(f"the checkout has changes; commit or remove them:\n{status.stdout}")
    if f"\n## {version}" not in (root / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise ReleaseError(
            f"CHANGELOG.md has no section '## {version}': rename its section 'Unreleased'"
        )


def build(folder: Path) -> list[Path]:
    """Build all distributions; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("pensieve_*"):
        earlier.unlink()
    run("build", "--sdist", "--outdir", str(folder), str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        options = ("-C", "wheel.cmake=false", "--no-deps", "--wheel-dir", scratch, str(ROOT))
        run("pip", "wheel", "--quiet", "--disable-pip-version-check", *options)
        (pure_wheel,) = Path(scratch).glob("*.whl")
        for machine in MACHINES:
            print(f"compiling the CPU kernels for {machine}", flush=True)
            library = compile_kernels(machine, Path(scratch) / machine)
            with_kernels(pure_wheel, library.read_bytes(), machine, folder)
        shutil.copy(pure_wheel, folder)
    client = [sys.executable, str(ROOT / "scripts" / "build_client"), str(folder)]
    subprocess.run(client, check=True, stdout=subprocess.DEVNULL)
    return sorted(folder.glob("pensieve_*"))


def compile_kernels(machine: str, folder: Path) -> Path:
    """Compile csrc/cpu for Linux on a machine such as aarch64; returns the library."""
    folder.mkdir()
    compiler = folder / "c++"
    # ziglang's clang takes an ARM processor's features in -mcpu, not in -march.
    compiler.write_text(
        f"#!{sys.executable}\nimport os, re, sys\n"
        "given = [re.sub(r'^-march=armv8.2-a', '-mcpu=generic', each) for each in sys.argv[1:]]\n"
        f"os.execv(sys.executable, [sys.executable, '-m', 'ziglang', 'c++', '-target', "
        f"'{machine}-linux-gnu.{GLIBC}', *given])\n",
        encoding="utf-8",
    )
    compiler.chmod(0o755)
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": str(compiler),
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
    }
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    made = folder / "build"
    for command in (
        ["cmake", "-S", str(ROOT / "csrc"), "-B", str(made), *defined],
        ["cmake", "--build", str(made), "--parallel", str(os.cpu_count() or 1)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ReleaseError(
                f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
    return made / LIBRARY


def with_kernels(pure: Path, library: bytes, machine: str, folder: Path) -> Path:
    """Write the wheel `pure` again, with the compiled library and the tag of its machine."""
    name = "-".join(pure.name.split("-")[:2])
    made_here = {f"{name}.dist-info/WHEEL", f"{name}.dist-info/RECORD"}
    with zipfile.ZipFile(pure) as archive:
        files = {each: archive.read(each) for each in archive.namelist() if each not in made_here}
    files[LIBRARY_IN_WHEEL] = library
    tag = f"py3-none-manylinux_{GLIBC.replace('.', '_')}_{machine}"
    return wheel_file.write(folder, name, tag, files, pure=False, by="scripts/release")


def check(made: Sequence[Path]) -> None:
    """Raise ReleaseError for the first thing that is wrong with the distributions or docs/deploy."""
    run("twine", "check", "--strict", *map(str, made))
    for wheel in made:
        if "manylinux" not in wheel.name:
            continue
        shown = output("auditwheel", "show", str(wheel))
        if f"manylinux_{GLIBC.replace('.', '_')}_" not in shown:
            raise ReleaseError(f"{wheel.name} needs a newer glibc than {GLIBC}:\n{shown}")
        if wheel.name.endswith(f"{platform.machine()}.whl"):
            check_loads(wheel)
    hadolint = shutil.which("hadolint")
    assert hadolint is not None, "the extra `release` has it"
    if subprocess.run([hadolint, str(DEPLOY / "Containerfile")], check=False).returncode:
        raise ReleaseError("hadolint found errors in docs/deploy/Containerfile")
    run("kubernetes_validate", "--strict", str(DEPLOY / "kubernetes.yaml"))


def check_loads(wheel: Path) -> None:
    """Install a wheel into an empty folder and load its kernels."""
    with tempfile.TemporaryDirectory() as place:
        run("pip", "install", "--quiet", "--no-deps", "--target", place, str(wheel))
        loads = [sys.executable, "-c", LOAD_PROGRAM, place]
        done = subprocess.run(loads, capture_output=True, text=True, check=False, cwd=place)
        if done.returncode:
            raise ReleaseError(f"the kernels of {wheel.name} do not load:\n{done.stderr[-2000:]}")


def run(module: str, *arguments: str) -> None:
    """Run a Python module as a program. Raises ReleaseError if it fails."""
    if subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode:
        raise ReleaseError(f"{module} {' '.join(arguments[:2])} failed")


def output(module: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
