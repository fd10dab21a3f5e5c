"""The table of releases: what it counts on is in the SGLang that is installed, and what is not is told."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from npr_sglang import check, releases
from npr_sglang.errors import PluginError
from npr_sglang.releases import RELEASES


@pytest.mark.sglang
def test_the_installed_release_has_all_that_the_table_counts_on() -> None:
    """Fails loudly when a newer SGLang, or one that was changed, breaks a hook; `make test-sglang SGLANG=RELEASE`."""
    if "NPR_SGLANG_PYTHON" not in os.environ:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    found = subprocess.run(
        [os.environ["NPR_SGLANG_PYTHON"], "-m", "npr_sglang.check"],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "finds all that it counts on" in found.stdout


@pytest.mark.parametrize("version", ["0.5.19", "0.6.0", "0.5.23.post1"])
def test_an_unknown_release_is_refused_by_name(version: str) -> None:
    told = rf"knows SGLang 0\.5\.20 and 0\.5\.23, but {version} is installed: install one of these"
    with pytest.raises(PluginError, match=told):
        releases.release_of(version)


def test_a_local_build_of_a_release_is_that_release() -> None:
    assert releases.release_of("0.5.23+cpu") is RELEASES["0.5.23"]


def test_without_sglang_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(releases, "version", missing)
    with pytest.raises(PluginError, match="but none is installed"):
        releases.installed.__wrapped__()


def test_all_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With functions of the standard library in the place of the server's."""
    targets = {
        "json.JSONDecoder.decode": ("self", "s"),
        "json.JSONDecoder.decode_all": ("self",),
        "json.nowhere.loads": ("s",),
        "json.loads": ("s", "cls", "schema", "limit"),
    }
    changed = replace(RELEASES["0.5.23"], targets=targets)
    monkeypatch.setattr(check, "installed", lambda: changed)
    with pytest.raises(PluginError) as raised:
        check.check_release()
    told = str(raised.value)
    assert "json.JSONDecoder.decode_all is gone" in told
    assert "json.nowhere.loads is gone" in told
    assert "json.loads has no parameter schema, limit" in told
    assert "json.JSONDecoder.decode is" not in told


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES.keys())
def test_what_is_hooked_is_checked(release: releases.Release) -> None:
    assert {hook.target for hook in release.hooks} <= release.targets.keys()
