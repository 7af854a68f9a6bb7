"""Write a wheel from the contents of its files; equal contents give equal bytes."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

TIME = (2020, 1, 1, 0, 0, 0)  # modification time of every file, so that builds are reproducible


def write(
    folder: Path, name: str, tag: str, files: Mapping[str, bytes], *, pure: bool, by: str
) -> Path:
    """Write `folder/name-tag.whl`; return its path. WHEEL and RECORD are generated, not part of `files`.

    `name` is NAME-VERSION. `by` becomes the wheel's generator.
    """
    info = f"{name}.dist-info"
    purelib = "true" if pure else "false"
    about = f"Wheel-Version: 1.0\nGenerator: {by}\nRoot-Is-Purelib: {purelib}\nTag: {tag}\n"
    packed = {**files, f"{info}/WHEEL": about.encode()}
    record = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in packed.items()]
    packed[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"{name}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name_inside, data in packed.items():
            entry = zipfile.ZipInfo(name_inside, TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
