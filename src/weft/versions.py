"""Tested versions of libraries, and one line for an installed version that is not tested.

pyproject.toml admits later minor releases, which come monthly, so that Weft can be installed beside them.
"""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.13", "1.16"),
    "trl": ("1.14", "1.17"),
    "peft": ("0.20", "0.22"),
    "diffusers": ("0.42", "0.43"),
    "compressed-tensors": ("0.20", "0.21"),
    "lightning-fabric": ("2.6", "2.7"),
    "lightning": ("2.6", "2.7"),
}
"""First tested version of each package, and the first that is not tested."""


def explain_version(package: str, found: str) -> str | None:
    """Line about a version that is not tested; None for a tested version, and for a package without tested versions.

    Args:
        package: name of the package.
        found: its version, such as "5.24.0" or "2.13.0+cpu".
    """
    if package not in TESTED:
        return None
    first, end = TESTED[package]
    if Version(first) <= Version(found) < Version(end):
        return None
    return (
        f"Weft is tested with {package} >= {first}, < {end}, and this is {found}: compare the losses of a few steps with "
        f'those of a tested version, pip install "{package}>={first},<{end}"'
    )


def explain_versions(packages: Iterable[str] = tuple(TESTED)) -> list[str]:
    """One line for each package that is installed in a version that is not tested."""
    lines = (explain_version(package, found) for package in packages if (found := _installed(package)))
    return [line for line in lines if line]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
