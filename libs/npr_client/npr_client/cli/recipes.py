"""A recipe file on its way to the controller: read, changed by `--set`, sent as YAML. The controller validates it.

Invariant: relative paths of models, data and dialects are of the caller's folder, and leave it as absolute ones: the
stack may have been started anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from npr_client.cli.options import absolute_dialect
from npr_common.errors import InvalidArgumentError, NotFoundError
from npr_common.references import absolute_reference

_ABSOLUTE: Mapping[str, Callable[[str], str]] = {
    "model": absolute_reference,
    "url": absolute_reference,
    "dataset_url": absolute_reference,
    "dialect": absolute_dialect,
}
"""The keys that name files, wherever in a recipe they stand."""


def read_recipe(path: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe in a file with `key=value` settings applied and local paths made absolute.

    Raises:
        NotFoundError: there is no such file.
        InvalidArgumentError: it is no YAML mapping, or a setting can't be applied.
    """
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(f"no recipe {path}: the bundled ones are in recipes/") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path} is not a recipe: it must be a YAML mapping")
    recipe: dict[str, Any] = content
    for setting in settings:
        recipe = _with_setting(recipe, setting)
    return {key: _with_absolute_paths(key, value) for key, value in recipe.items()}


def to_yaml(recipe: Mapping[str, Any]) -> str:
    """The recipe as YAML, keys in their order."""
    text: str = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    return text


def _with_absolute_paths(key: str, value: Any) -> Any:
    """A copy of what the key holds in which every reference to a file is one that any process understands."""
    if isinstance(value, dict):
        return {inner: _with_absolute_paths(inner, item) for inner, item in value.items()}
    if isinstance(value, list):
        return [_with_absolute_paths(key, item) for item in value]
    make_absolute = _ABSOLUTE.get(key)
    return make_absolute(value) if make_absolute is not None and isinstance(value, str) else value


def _with_setting(recipe: dict[str, Any], setting: str) -> dict[str, Any]:
    key, equals, text = setting.partition("=")
    if not key or not equals:
        raise InvalidArgumentError(f"--set {setting}: write key=value, such as --set stages.0.steps=3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidArgumentError(f"--set {setting}: the value is not YAML") from error
    changed = _replaced(recipe, key.split("."), value, setting)
    assert isinstance(changed, dict)
    return changed


def _replaced(node: Any, path: Sequence[str], value: Any, setting: str) -> Any:
    """A copy of `node` with the value at `path`; keys that are missing are made, list items are not."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(node, list):
        index = _index(node, head, setting)
        return [_replaced(item, rest, value, setting) if i == index else item for i, item in enumerate(node)]
    if node is None or isinstance(node, dict):
        members = node or {}
        return {**members, head: _replaced(members.get(head), rest, value, setting)}
    raise InvalidArgumentError(f"--set {setting}: the key before {head!r} holds a value, not a mapping")


def _index(items: list[Any], head: str, setting: str) -> int:
    """A list item by its number, or by its `name` or `kind`."""
    for index, item in enumerate(items):
        if head == str(index) or (isinstance(item, dict) and head in (item.get("name"), item.get("kind"))):
            return index
    raise InvalidArgumentError(f"--set {setting}: no item {head!r} in a list of {len(items)}")
