"""Versions of the libraries whose scripts run under Weft, and a clear text where one is not known.

`TrainerMixin` and `WeftAccelerator` override methods of Transformers and accelerate, some of which are private. A version of
Transformers in which one is missing is refused; a version that is not tested runs with a warning.
"""

import warnings
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from weft.errors import JobError

TESTED: dict[str, tuple[str, str]] = {
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.13", "1.16"),
    "trl": ("1.14", "1.17"),
    "peft": ("0.20", "0.22"),
    "diffusers": ("0.42", "0.43"),
    "lightning-fabric": ("2.6", "2.7"),
    "lightning": ("2.6", "2.7"),
}
"""First tested version of each package, and the first that is not tested."""


def check_versions() -> None:
    """Warn of installed versions that are not tested."""
    for package, (first, end) in TESTED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if not Version(first) <= Version(found) < Version(end):
            warnings.warn(
                f"Weft is tested with {package} >= {first}, < {end}, and this is {found}: compare the losses of a few steps "
                "with those of the script without Weft",
                stacklevel=3,
            )


def check_methods(library: str, kind: type, names: tuple[str, ...]) -> None:
    """Refuse a version of a library whose class lacks a method that Weft overrides.

    Args:
        library: name of the package.
        kind: class of the library.
        names: its methods.

    Raises:
        JobError: names the methods that are missing, and the tested versions.
    """
    missing = [name for name in names if not hasattr(kind, name)]
    if missing:
        first, end = TESTED[library]
        raise JobError(
            f"{kind.__name__} of {library} {version(library)} has no {', '.join(missing)}",
            where=f"{library} {version(library)}",
            rule=f"Weft overrides methods that {library} >= {first}, < {end} has",
            fix=f'pip install "{library}>={first},<{end}"',
        )
