"""Names of models and data sets in recipes, resolved to a path or fsspec URL.

Four forms: `package:MODULE/PATH` is a file or folder that an installed Python package ships (the module is located,
never imported); `bundled:NAME` is a model that the learner ships; anything with `://` is an fsspec URL and stays as it
is; the rest is a local path.
"""

import importlib.util
from pathlib import Path

from npr_common.errors import NotFoundError

PACKAGE_PREFIX = "package:"
BUNDLED_PREFIX = "bundled:"


def resolve_reference(reference: str) -> str:
    """The path or URL that a recipe's reference means. Raises `NotFoundError` saying what to install or to correct."""
    if reference.startswith(PACKAGE_PREFIX):
        return str(_in_package(reference.removeprefix(PACKAGE_PREFIX)))
    if "://" in reference:
        return reference
    path = Path(reference).expanduser()
    if not path.exists():
        raise NotFoundError(f"{reference} is not there: correct the path", reason="REFERENCE_NOT_FOUND")
    return str(path)


def absolute_reference(reference: str) -> str:
    """The same reference as a process in another folder understands it: a local path becomes absolute."""
    if "://" in reference or reference.startswith((PACKAGE_PREFIX, BUNDLED_PREFIX)):
        return reference
    return str(Path(reference).expanduser().absolute())


def _in_package(reference: str) -> Path:
    module, _, inner = reference.partition("/")
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise NotFoundError(
            f"the package {module} is not installed: `make real` installs the optional ones",
            reason="PACKAGE_NOT_INSTALLED",
        )
    path = Path(folders[0]) / inner
    if not path.exists():
        raise NotFoundError(f"the package {module} has no {inner}", reason="REFERENCE_NOT_FOUND")
    return path
