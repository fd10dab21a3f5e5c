"""Names of models and data sets in recipes, resolved to a path or fsspec URL.

Three forms: `package:MODULE/PATH` is a file or folder that an installed Python package ships (the module is located,
never imported); anything with `://` is an fsspec URL and stays as it is; the rest is a local path.
"""

import importlib.util
from pathlib import Path

from npr_common.errors import NotFoundError

PACKAGE_PREFIX = "package:"


def resolve_reference(reference: str) -> str:
    """The path or URL that a recipe's reference means. Raises `NotFoundError` saying what to install or to correct."""
    if reference.startswith(PACKAGE_PREFIX):
        return str(_in_package(reference.removeprefix(PACKAGE_PREFIX)))
    if "://" in reference:
        return reference
    path = Path(reference).expanduser()
    if not path.exists():
        raise NotFoundError(f"{reference} is not there: correct the path in the recipe", reason="REFERENCE_NOT_FOUND")
    return str(path)


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
