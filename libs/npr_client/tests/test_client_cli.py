"""The `npr` command: errors are one line, JSON is JSON, recipes are changed by `--set`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from npr_client import stack
from npr_client.cli.main import app
from npr_client.cli.recipes import read_recipe
from npr_client.stack import StateDir
from npr_common.errors import InvalidArgumentError

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No stack and no addresses but those that a test makes."""
    for name in list(os.environ):
        if name.startswith("NPR_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NPR_STATE_DIR", str(tmp_path / "npr"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def buffer_stack(nowhere: Path) -> Iterator[StateDir]:
    place = StateDir.at(None)
    stack.up(place, ["buffer"])
    yield place
    stack.down(place)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "missing.yaml"], "no recipe missing.yaml"),
        (["run"], "give either a recipe's file or --resume RUN"),
        (["run", "--resume", "r", "--set", "a=1"], "--set changes a new run's recipe"),
        (["submit"], "give either --prompt TEXT or --file FILE.jsonl"),
        (["submit", "--file", "missing.jsonl"], "no file missing.jsonl"),
        (["submit", "--prompt", "x"], "no rollout service is known: start a local stack with `npr up`"),
        (["jobs"], "no rollout service is known"),
        (["show", "t/0", "--run", "r"], "no buffer service is known"),
        (["show", "t/0", "--dialect", "klingon"], "klingon"),
        (["runs"], "no controller service is known"),
        (["verify", "missing.jsonl"], "no file missing.jsonl"),
        (["serve-policy", "nobody"], "no policy nobody in"),
        (["serve-policy", "nobody@x"], "write LINE or LINE@VERSION"),
        (["up", "--only", "bufer"], "the stack has no component 'bufer'"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(arguments: list[str], told: str) -> None:
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert told in lines[0]


def test_debug_shows_where_an_error_comes_from() -> None:
    result = RUNNER.invoke(app, ["--debug", "run", "missing.yaml"])
    assert result.exception is not None
    assert "no recipe missing.yaml" in str(result.exception)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "file.jsonl:2: not JSON"),
        ("[1]", "file.jsonl:2: not a JSON object"),
        ('{"gold": "1"}', "file.jsonl:2: no field 'response'"),
        ('{"gold": ["1"], "response": "1"}', "file.jsonl:2: field 'gold' must be text"),
        ('{"gold": "1", "response": "1", "verdict": "right"}', "file.jsonl:2: field 'verdict' must be one of"),
    ],
)
def test_a_bad_line_of_a_file_is_named(nowhere: Path, line: str, told: str) -> None:
    (nowhere / "file.jsonl").write_text(f'{{"gold": "1", "response": "1"}}\n{line}\n', encoding="utf-8")
    result = RUNNER.invoke(app, ["verify", "file.jsonl"])
    assert result.exit_code == 2
    assert told in result.stderr


def test_status_and_audit_of_a_running_stack(buffer_stack: StateDir) -> None:
    result = RUNNER.invoke(app, ["status", "--json"])
    assert result.exit_code == 0, result.output
    status = json.loads(result.stdout)
    assert status["healthy"]
    assert status["queue"]["waiting_groups"] == 0

    result = RUNNER.invoke(app, ["audit", "nothing"])
    assert result.exit_code == 2
    assert "holds nothing of a run 'nothing'" in result.stderr

    result = RUNNER.invoke(app, ["show", "t/0"])
    assert result.exit_code == 2
    assert "no trajectory 't/0'" in result.stderr


def test_status_without_a_stack_fails_in_a_way_that_scripts_can_tell() -> None:
    result = RUNNER.invoke(app, ["status", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["healthy"] is False


def test_up_and_down_as_a_user_types_them(nowhere: Path) -> None:
    command = [sys.executable, "-m", "npr_client.cli.main"]
    up = subprocess.run(
        [*command, "up", "--only", "valkey", "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert up.returncode == 0, up.stderr
    assert json.loads(up.stdout)["supervisor_alive"]
    down = subprocess.run([*command, "down", "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(down.stdout) == {"stopped": True}


def test_up_tells_each_wrong_variable_on_a_line_and_nothing_of_what_was_stopped(
    buffer_stack: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.down(buffer_stack)
    monkeypatch.setenv("NPR_BUFFER_MAX_OPEN_GROUPS", "many")
    monkeypatch.setenv("NPR_MAX_MESSAGE_MIB", "0")
    result = RUNNER.invoke(app, ["up", "--only", "buffer"])
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert "buffer: stopped" not in lines
    assert lines[-4:-1] == [
        "buffer: wrong settings",
        "NPR_MAX_MESSAGE_MIB: Input should be greater than or equal to 1",
        "NPR_BUFFER_MAX_OPEN_GROUPS: Input should be a valid integer, unable to parse string as an integer",
    ]
    assert lines[-1].startswith("error: buffer does not start: correct NPR_MAX_MESSAGE_MIB, NPR_BUFFER_MAX_OPEN_GROUPS")


def test_doctor_finds_this_machine_fit() -> None:
    result = RUNNER.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    checks = {check["name"]: check for check in map(json.loads, result.stdout.splitlines())}
    assert {"python", "services", "torch", "valkey", "loopback", "disk", "memory"} == set(checks)
    assert "v=" in checks["valkey"]["detail"]


def recipe(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        "name: tiny\nstages:\n- {kind: zero, steps: 13}\n- {kind: npr, steps: 34}\ndata: {}\n", encoding="utf-8"
    )
    return path


def test_settings_change_a_recipe_by_path_name_and_number(nowhere: Path) -> None:
    changed = read_recipe(
        recipe(nowhere), ["stages.0.steps=1", "stages.npr.steps=2", "data.train.count=[1, 2]", "seed=true"]
    )
    assert changed["stages"] == [{"kind": "zero", "steps": 1}, {"kind": "npr", "steps": 2}]
    assert changed["data"] == {"train": {"count": [1, 2]}}
    assert changed["seed"] is True
    assert read_recipe(recipe(nowhere)) == yaml.safe_load(recipe(nowhere).read_text(encoding="utf-8"))


def test_local_paths_of_a_recipe_are_the_callers(nowhere: Path) -> None:
    content = {
        "model": "models/one",
        "dialect": "tags.yaml",
        "data": {
            "train": {"kind": "file", "url": "data/a.jsonl", "limit": 3},
            "test": {
                "near": {"kind": "file", "url": str(nowhere / "b.jsonl")},
                "far": {"kind": "file", "url": "s3://x/c"},
            },
        },
        "stages": [{"kind": "multiverse", "dataset_url": "d.jsonl"}, {"kind": "npr", "steps": 2}],
        "prompt": {"user": "model: {problem}"},
    }
    path = nowhere / "somewhere" / "recipe.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    expected = json.loads(
        json.dumps(content)
        .replace('"models/', f'"{nowhere}/models/')
        .replace('"tags', f'"{nowhere}/tags')
        .replace('"data/', f'"{nowhere}/data/')
        .replace('"d.jsonl', f'"{nowhere}/d.jsonl')
    )
    assert read_recipe(path) == expected
    kept = {"model": "bundled:tiny", "dialect": "multiverse"}
    changed = read_recipe(path, [f"{key}={value}" for key, value in kept.items()])
    assert changed == expected | kept
    assert read_recipe(path, ["model=other"])["model"] == str(nowhere / "other")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("steps", "write key=value"),
        ("stages.7.steps=1", "no item '7' in a list of 2"),
        ("name.x=1", "'x' holds a value, not a mapping"),
        ("seed=[", "the value is not YAML"),
    ],
)
def test_a_setting_that_cannot_be_applied_is_named(nowhere: Path, setting: str, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--set") as error:
        read_recipe(recipe(nowhere), [setting])
    assert told in str(error.value)


def test_a_recipe_must_be_a_mapping(nowhere: Path) -> None:
    (nowhere / "list.yaml").write_text("- 1\n", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="must be a YAML mapping"):
        read_recipe(nowhere / "list.yaml")
