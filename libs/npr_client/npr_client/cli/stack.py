"""`npr up`, `npr down`, `npr status`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from npr_client import stack
from npr_client.cli.options import JsonOption, StateDirOption
from npr_client.cli.output import Output
from npr_client.render.tables import stack_table
from npr_client.stack.layout import StateDir
from npr_client.stack.state import ComponentState, Phase, StackState, load_state

NOT_HEALTHY = 1


def up(
    only: Annotated[str | None, typer.Option(help="Comma-separated components, with what they need.")] = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Starts the local stack, or heals it; returns when every service is healthy."""
    out = Output(as_json)
    place = StateDir.at(state_dir)
    bring_up(place, out, only)
    status = stack.status(place)
    out.result(asdict(status), stack_table(status))


def bring_up(place: StateDir, out: Output, only: str | None = None) -> None:
    """`stack.up`, telling what happens on standard error."""
    names = [name.strip() for name in only.split(",")] if only else None
    told: dict[str, Phase] = {}
    before = load_state(place.state_file)
    if before is not None and before.supervisor_alive:
        told.update({name: component.phase for name, component in before.components.items()})

    def tell(state: StackState) -> None:
        for name, component in state.components.items():
            # What was stopped before is about to start: no news.
            if component.phase is not told.get(name) and component.phase is not Phase.STOPPED:
                for line in _news(name, component):
                    out.say(line)
            told[name] = component.phase

    stack.up(place, names, on_change=tell)


def _news(name: str, component: ComponentState) -> list[str]:
    """What has become of a component; a line more for each variable that is wrong."""
    told, error = f"{name}: {component.phase.replace('_', ' ')}", component.last_error
    if component.phase is Phase.WRONG_SETTINGS:
        return [told, *error.splitlines()]
    return [f"{told} ({error})" if error else told]


def down(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Drains and stops all that `npr up` started here. Harmless when nothing runs."""
    out = Output(as_json)
    place = StateDir.at(state_dir)
    stopped = stack.down(place)
    out.result({"stopped": stopped}, Text("stopped" if stopped else f"nothing ran in {place.root}"))


def status(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Shows each service's health and address, the queue and the policy; exit code 1 when not all are well."""
    out = Output(as_json)
    report = stack.status(StateDir.at(state_dir))
    out.result({**asdict(report), "healthy": report.healthy}, stack_table(report))
    if not report.healthy:
        raise typer.Exit(NOT_HEALTHY)
