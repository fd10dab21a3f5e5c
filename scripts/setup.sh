#!/usr/bin/env bash
# Makes the environment: setup.sh PYTHON VENV PACKAGE...
set -euo pipefail
python=$1 venv=$2
shift 2

say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }

started=$SECONDS
[ -x "$venv/bin/python" ] || { say "making $venv with $python"; "$python" -m venv "$venv"; }
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)

say "1/3 PyTorch ($(grep '^torch==' constraints.txt))"
"${pip[@]}" "$(grep '^torch==' constraints.txt)"
say "2/3 libraries and tools (constraints.txt)"
"${pip[@]}" -c constraints.txt -r requirements-dev.txt
say "3/3 the packages of this repository"
editable=()
for package in "$@"; do editable+=(-e "$package"); done
"${pip[@]}" -c constraints.txt --no-build-isolation "${editable[@]}"
say "ready after $((SECONDS - started)) s"
