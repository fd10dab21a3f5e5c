"""What the benchmarks share: `--quick`, `--json`, and how figures are told.

Every benchmark measures its rivals in the same run and names the result `ratios`: how many times as fast as the rival.
`--quick` takes about a minute with the tiny model; with `--json` the last line is one JSON object with all figures.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Begin = Callable[[str], None]
"""Called where a piece of work begins, with its name."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the shared options; a benchmark adds its own.

    Starts the interpreter anew with OMP_WAIT_POLICY=PASSIVE where the variable is not set: spinning OpenMP threads make
    figures erratic on shared cores, and OpenMP reads it once, when torch is loaded. So it is a benchmark's first call.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a smaller load; about a minute")
    made.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return made


def tell(figures: Mapping[str, object], *, as_json: bool, tables: Sequence[Table] = ()) -> None:
    """Prints the tables, or without any a line a figure; with `as_json` all figures as one object on the last line."""
    if not figures.get("ratios"):
        raise ValueError("a benchmark tells the ratios to its rivals")
    if tables:
        console = Console(width=120)
        for each in tables:
            console.print(each)
    else:
        for name, value in _flat(figures):
            print(f"{name:60} {value:,.3f}" if isinstance(value, float) else f"{name:60} {value}")
    if as_json:
        print(json.dumps(figures))


@contextmanager
def progress(pieces: int) -> Iterator[Begin]:
    """Counts pieces of work on the error stream as they begin, and names the one that is on.

    A bar on a terminal; elsewhere a line a piece, such as `2/7 batch 1: first passes`.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        numbers = itertools.count(1)
        yield lambda name: print(f"{next(numbers)}/{pieces} {name}", file=sys.stderr, flush=True)
        return
    columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    # A thread that redraws would take its time from what is measured; so it is drawn when a piece begins.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=pieces)

        def begin(name: str) -> None:
            bar.update(task, advance=1, description=name, refresh=True)

        yield begin


def aside(name: str, figures: Mapping[str, object]) -> None:
    """Tells a piece's figures on the error stream when it is done, so that a long run that is cut off has told them."""
    print(f"    {name}: {json.dumps(figures)}", file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> Table:
    """A table whose first column is text and whose others are numbers, shown with three digits that count."""
    made = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def speed(tokens_per_second: float, *, stalled: bool) -> float | str:
    """A speed as a table shows it; one that its own steps contradict is marked, so that it is read as no result."""
    return f"{_cell(tokens_per_second)} (stalled)" if stalled else tokens_per_second


def stall_note(stalled: bool) -> str:
    """A table's note on the mark, where it stands."""
    why = "(stalled): the seconds are over twice those of as many median steps, so it is no result; run it again"
    return why if stalled else ""


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The bootstrapped 95% interval of the median."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(samples, k=len(samples))) for _ in range(1000))
    return medians[25], medians[974]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _flat(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested figures by their dotted names."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
