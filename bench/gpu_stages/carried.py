"""What is put on the path of a machine without an installation and a network: the two packages, and gathered wheels."""

import sys
import zipfile
from pathlib import Path


def import_path(root: Path, wheels: Path, folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Folders for PYTHONPATH, made in `folder`, and the wheels that this Python cannot use, with the reason.

    The checkout itself stays off the path: `kernels/` in it would be taken for Hugging Face's package of that name.
    """
    packages = folder / "packages"
    packages.mkdir()
    for source in (root / "amir", root / "kernels" / "amir_kernels"):
        (packages / source.name).symlink_to(source)
    unpacked, left_out = folder / "unpacked", {}
    for path in sorted(wheels.glob("*.whl")):
        if not zipfile.is_zipfile(path):
            left_out[path.name] = "it is damaged: it is not a zip archive; gather the wheels again"
        elif suits(path.name):
            unpack(path, unpacked)
        else:
            left_out[path.name] = f"it is not for Python {sys.version_info.major}.{sys.version_info.minor} here"
    return [packages, *([unpacked] if unpacked.exists() else [])], left_out


def suits(name: str) -> bool:
    """Whether this Python can import a wheel of that name."""
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    return not parse_wheel_filename(name)[3].isdisjoint(sys_tags())


def unpack(wheel: Path, folder: Path) -> None:
    """Extracts the modules of a wheel, those in its data folder for site-packages included."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            first, _, rest = member.filename.partition("/")
            if first.endswith(".data"):
                kind, _, member.filename = rest.partition("/")
                if kind not in ("purelib", "platlib") or not member.filename:
                    continue
            archive.extract(member, folder)
