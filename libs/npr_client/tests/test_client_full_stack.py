"""The command against all five services and the bundled model: what a user does in the first ten minutes."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from npr_client.testing import NprCommand, npr_with_stack

pytestmark = pytest.mark.slow

PROBLEM = "max of a=4*7+8, b=3*2+8"
RECIPE = """
name: two-steps
model: bundled:tiny
data:
  train: {kind: multipart, split: train, count: 100}
  test: {multipart: {kind: multipart, split: test, count: 16}}
decoding: {max_tokens: 200}
stages:
- {kind: zero, steps: 2, prompts_per_step: 4, samples_per_prompt: 8, learning: {learning_rate: 1.0e-4}}
"""


@pytest.fixture(scope="module")
def npr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NprCommand]:
    with npr_with_stack(tmp_path_factory.mktemp("stack")) as command:
        yield command


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_job_names_its_model_and_its_trajectories_can_be_shown(npr: NprCommand) -> None:
    _, err = npr("submit", "--prompt", PROBLEM, code=2)
    assert "no policy is being served" in err
    assert "policy  none" in npr("status")[0]
    assert "npr serve-policy RUN" in npr("generate", PROBLEM, code=2)[1]

    out, _ = npr(
        *("submit", "--model", "bundled:tiny", "--prompt", PROBLEM, "--gold", "36"),
        *("--samples", "3", "--max-tokens", "150", "--job-id", "first", "--watch", "--json"),
    )
    told = lines(out)
    assert told[0] == {"job_id": "first"}
    job = told[-1]["job"]
    assert isinstance(job, dict)
    assert job["state"] == "JOB_STATE_COMPLETED"
    assert job["trajectories"] == 3
    assert sum(job["verdicts"].values()) == 3
    names = [line["trajectory"]["trajectory"]["trajectory_id"] for line in told[1:-1]]  # type: ignore[index]
    assert len(set(names)) == 3

    _, err = npr("show", "first", code=2)
    assert "`npr trajectories jobs --channel first`" in err
    _, err = npr("submit", "--prompt", PROBLEM, "--verifier", "chess", code=2)
    assert "no verifier is named 'chess'; choose one of " in err

    shown, _ = npr("show", names[0])
    assert PROBLEM.split(",", maxsplit=1)[0] in shown
    assert "critical path" in shown
    assert len(lines(npr("trajectories", "jobs", "--json")[0])) == 1
    assert "first" in npr("jobs")[0]
    assert json.loads(npr("status", "--json")[0])["policy"]["line"].startswith("model-tiny-")

    repeated, _ = npr("submit", "--prompt", PROBLEM, "--gold", "36", "--job-id", "first", "--json", code=0)
    assert lines(repeated) == [{"job_id": "first"}]


def test_generation_streams_tokens_and_ends_with_the_trajectory(npr: NprCommand) -> None:
    npr("submit", "--model", "bundled:tiny", "--prompt", PROBLEM, "--max-tokens", "5", "--watch")
    events = lines(npr("generate", PROBLEM, "--temperature", "0", "--max-tokens", "150", "--json")[0])

    trajectory = events[-1]["trajectory"]
    assert isinstance(trajectory, dict)
    texts = [event["tokens"]["text"] for event in events[:-1]]  # type: ignore[index]
    assert trajectory["response_text"] in "".join(texts)
    streamed = [token for event in events[:-1] for token in event["tokens"]["token_ids"]]  # type: ignore[index]
    assert streamed == trajectory["token_ids"][trajectory["prompt_length"] :]


def test_a_run_writes_its_report_and_prints_its_path_last(npr: NprCommand) -> None:
    (npr.folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    out, err = npr("run", "recipe.yaml", "--run-id", "r1", "--set", "stages.zero.steps=1", "--json")

    path = Path(out.splitlines()[-1])
    report = json.loads(path.read_bytes())
    assert [stage["name"] for stage in report["stages"]] == ["seed", "zero"]
    assert path.with_name("report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    events = lines("\n".join(out.splitlines()[:-1]))
    assert [event["sequence"] for event in events] == [str(number + 1) for number in range(len(events))]
    assert "step 1/1" in err
    assert "sound" in npr("audit", "r1")[0]

    folder = npr.folder / "exported"
    npr("export", "r1", str(folder))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    _, err = npr("export", "r1", str(folder), code=2)
    assert "nothing is overwritten" in err

    _, err = npr("run", "recipe.yaml", "--run-id", "r1", code=2)
    assert "`npr run --resume r1`" in err
    _, err = npr("run", "recipe.yaml", "--set", "stages.zero.stepz=1", code=2)
    assert "stepz: unknown key" in err


def test_interrupting_leaves_a_run_going_and_stop_and_resume_work(npr: NprCommand) -> None:
    (npr.folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    following = npr.start("run", "recipe.yaml", "--run-id", "r2", "--set", "stages.zero.steps=40")
    assert following.stderr is not None
    while "zero starts" not in following.stderr.readline():
        assert following.poll() is None
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=30)
    assert following.returncode == 130
    assert "r2 goes on" in err

    assert '"RUN_STATE_STOPPED"' in npr("stop", "r2", "--json")[0]
    _, err = npr("run", "--run-id", "r2", "recipe.yaml", "--set", "stages.zero.steps=40", code=3)
    assert "r2: stopped; go on with `npr run --resume r2`" in err
    assert "RUN_STATE_RUNNING" in npr("run", "--resume", "r2", "--detach", "--json")[0]
    npr("stop", "r2")


def test_evaluations_take_models_and_published_policies(npr: NprCommand) -> None:
    common = ("--data", "held-out=multipart", "--limit", "12", "--samples", "2", "--json")
    out, _ = npr("eval", "--model", "bundled:tiny", "--sequential", "--run-id", "e1", *common)
    stage = json.loads(Path(out.splitlines()[-1]).read_bytes())["stages"][0]
    assert (stage["prompts"], stage["samples_per_problem"]) == (12, 2)
    assert list(stage["benchmarks"]) == ["held-out"]

    npr("eval", "--policy", "e1@0", "--run-id", "e2", *common)
    _, err = npr("eval", "--policy", "e1@0", "--sequential", *common)
    assert "warning: " not in err
    npr("publish", "bundled:tiny-npr", "--line", "forks")
    out, err = npr("eval", "--policy", "forks", "--sequential", *(part for part in common if part != "--json"))
    assert [line for line in err.splitlines() if line.startswith("warning: forks was trained to decode in parallel")]
    assert Path(out.splitlines()[-1]).name == "report.json"
    _, err = npr("eval", "--policy", "e1@7", *common, code=2)
    assert "no policy e1@7" in err
    _, err = npr("eval", "--model", "/nowhere", *common, code=2)
    assert "/nowhere is not there: correct the path;" in err


def test_the_policy_that_is_served_can_be_changed(npr: NprCommand) -> None:
    for line in ("one", "two"):
        npr("publish", "bundled:tiny", "--line", line)
    assert "serving one@0" in npr("serve-policy", "one")[0]
    told = json.loads(npr("serve-policy", "two@0", "--in-flight", "finish-on-old", "--json")[0])
    assert (told["policy"]["line"], told["previous"]["line"], told["aborted"]) == ("two", "one", 0)
    assert json.loads(npr("status", "--json")[0])["policy"]["line"] == "two"
    last = json.loads(npr("generate", PROBLEM, "--max-tokens", "20", "--json")[0].splitlines()[-1])
    assert last["trajectory"]["policy"] == told["policy"]
    _, err = npr("serve-policy", "one@7", code=2)
    assert "no policy one@7" in err


def test_a_recipes_paths_are_those_of_the_callers_folder(npr: NprCommand) -> None:
    caller = NprCommand(npr.folder / "caller")  # the stack was started one folder above
    (caller.folder / "data").mkdir(parents=True)
    (caller.folder / "data" / "own.jsonl").write_text(
        json.dumps({"question": PROBLEM, "answer": "36"}) + "\n", encoding="utf-8"
    )
    evaluation = RECIPE.partition("stages:")[0].replace("test: {", "test: {own: {kind: file, url: data/own.jsonl}, ")
    (caller.folder / "own.yaml").write_text(evaluation, encoding="utf-8")
    out, _ = caller("run", "own.yaml", "--state-dir", str(npr.state_dir), "--run-id", "own", "--json")
    report = Path(out.splitlines()[-1])
    assert report.is_relative_to(caller.folder)
    assert set(json.loads(report.read_bytes())["stages"][0]["benchmarks"]) == {"own", "multipart"}


def test_verdicts_of_a_running_and_of_a_private_service_agree(npr: NprCommand) -> None:
    pairs = [("1/2", "\\boxed{0.5}", "correct"), ("7", "\\boxed{8}", "incorrect"), ("3", "\\boxed{3}", "incorrect")]
    records = [{"gold": gold, "response": response, "verdict": verdict} for gold, response, verdict in pairs]
    file = npr.folder / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")

    running, _ = npr("verify", str(file), "--json", code=1)
    private, _ = npr("verify", str(file), "--json", "--state-dir", str(npr.folder / "elsewhere"), code=1)
    for told in (lines(running), lines(private)):
        assert [line["agrees"] for line in told[:-1]] == [True, True, False]
        assert all(line["reason"] for line in told[:-1])
        summary = told[-1]["summary"]
        assert isinstance(summary, dict)
        assert (summary["compared"], summary["agree"], summary["disagree"]) == (3, 2, 1)
