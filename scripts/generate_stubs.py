"""Generates the Python stubs of every proto into libs/npr_common/npr; with --check, fails when they have drifted."""

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "libs" / "npr_common" / "npr"


def generate(into: Path) -> None:
    """Runs protoc over all protos; `into` receives the package `npr`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={into}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
    beside_python = str(Path(sys.executable).parent)  # where protoc finds the mypy plugins
    environment = {**os.environ, "PATH": f"{beside_python}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *sources]
    subprocess.run(command, check=True, env=environment)
    for folder in (into / "npr", *(path for path in (into / "npr").rglob("*") if path.is_dir())):
        (folder / "__init__.py").touch()
    (into / "npr" / "py.typed").touch()


def drift(fresh: Path) -> list[str]:
    """Paths below the stubs' folder that differ from freshly generated ones, or exist on one side only."""
    old = {path.relative_to(STUBS) for path in STUBS.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    new = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    changed = {path for path in old & new if not filecmp.cmp(STUBS / path, fresh / path, shallow=False)}
    return sorted(str(path) for path in (old ^ new) | changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on drift")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "npr"
        if arguments.check:
            differing = drift(fresh)
            for path in differing:
                sys.stderr.write(f"stub differs from its proto: {path} (run `make protos`)\n")
            return 1 if differing else 0
        shutil.rmtree(STUBS, ignore_errors=True)
        shutil.copytree(fresh, STUBS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
