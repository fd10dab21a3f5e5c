"""What the benchmarks share: `--quick`, `--json`, and how figures are told.

Every benchmark measures its rivals in the same run and names the result `ratios`: how many times as fast as the rival.
`--quick` stays below a minute; with `--json` the last line is one JSON object with all figures.
"""

import argparse
import json
from collections.abc import Iterator, Mapping


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the shared options; a benchmark adds its own."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a smaller load; under a minute")
    made.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return made


def tell(figures: Mapping[str, object], *, as_json: bool) -> None:
    """Prints a line a figure, and with `as_json` all of them as one object on the last line."""
    if not figures.get("ratios"):
        raise ValueError("a benchmark tells the ratios to its rivals")
    for name, value in _flat(figures):
        print(f"{name:60} {value:,.3f}" if isinstance(value, float) else f"{name:60} {value}")
    if as_json:
        print(json.dumps(figures))


def _flat(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested figures by their dotted names."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
