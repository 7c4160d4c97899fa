"""Versions of the libraries whose scripts run under Weft, and a clear text where one is not known.

`TrainerMixin` and `WeftAccelerator` override methods of Transformers and accelerate, some of which are private. A version of
Transformers in which one is missing is refused; a version that is not tested runs with a warning.
"""

import warnings
from importlib.metadata import version

from weft.errors import JobError
from weft.versions import TESTED, explain_versions


def check_versions() -> None:
    """Warn of installed versions that are not tested."""
    for line in explain_versions():
        warnings.warn(line, stacklevel=3)


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
