"""References in recipes resolve to what they name, or say what to do."""

from pathlib import Path

import pytest

import npr_common
from npr_common.errors import NotFoundError
from npr_common.references import absolute_reference, resolve_reference


def test_a_package_file_is_located_without_import() -> None:
    assert resolve_reference("package:npr_common/py.typed") == str(Path(npr_common.__file__).parent / "py.typed")


def test_urls_stay_and_paths_must_exist(tmp_path: Path) -> None:
    assert resolve_reference("s3://bucket/model") == "s3://bucket/model"
    assert resolve_reference(str(tmp_path)) == str(tmp_path)


def test_an_absolute_reference_means_the_same_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    told = absolute_reference("models/one")
    monkeypatch.chdir("/")
    assert resolve_reference(told) == str(tmp_path / "models" / "one")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute_reference("~/models") == str(tmp_path / "models")
    for elsewhere in ("s3://bucket/model", "package:npr_common/py.typed", "bundled:tiny", "/absolute"):
        assert absolute_reference(elsewhere) == elsewhere


@pytest.mark.parametrize(
    "reference", ["package:no_such_module/x", "package:npr_common/nothing", "/nowhere/at/all", "package:"]
)
def test_what_is_missing_is_named(reference: str) -> None:
    with pytest.raises(NotFoundError):
        resolve_reference(reference)
