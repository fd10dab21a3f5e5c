#!/usr/bin/env bash
# Makes an environment with SGLang for the CPU and the plug-in, and prints its Python: setup-sglang.sh PYTHON [RELEASE]
# SGLang and all that it needs are installed once for all checkouts, in NPR_SGLANG_HOME (the user's cache folder unless
# set), under a name that depends on all of it; this checkout's packages lie in the checkout, anew each time.
# What a release needs otherwise than the default one is in sglang_cpu/RELEASE.
set -euo pipefail
shopt -s nullglob

say() { printf '\033[1m[sglang]\033[0m %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

[ $# -ge 1 ] || fail "usage: setup-sglang.sh PYTHON [RELEASE], such as: setup-sglang.sh python3.11"
python=$1
command -v "$python" > /dev/null || fail "there is no $python here: give a Python 3.11 or newer"
cd "$(dirname "$0")/.."
here=scripts/sglang_cpu
default=$(sed -n 's/^sglang==//p' "$here/requirements-nodeps.txt")
release=${2:-$default}
if [ "$release" != "$default" ] && [ ! -d "$here/$release" ]; then
    known=("$here"/*/requirements.txt)
    fail "there is nothing for SGLang $release: give $default $(basename -a "${known[@]%/*}" | xargs)"
fi

# A package a line; what the release has of its own replaces what the default has.
requirements() {
    awk -F== '/^[^#]/ { line[tolower($1)] = $0 } END { for (name in line) print line[name] }' \
        "$here/$1" $(ls "$here/$release/$1" 2>/dev/null) | sort
}

# What is said only where it fails: pip complains of all that SGLang wants on a GPU, and gets here.
quietly() {
    "$@" > "$venv/setup.log" 2>&1 || { cat "$venv/setup.log" >&2; exit 1; }
}

torch=$(grep '^torch==' constraints.txt)
nodeps=$(requirements requirements-nodeps.txt)
others=$(requirements requirements.txt)
version=$(cat <(echo "$nodeps $others $torch") "$here"/*.py "$here"/sgl_kernel/*.py | sha256sum | cut -c1-12)
venv=${NPR_SGLANG_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/npr}/sglang-$release-$version

started=$SECONDS
if [ ! -e "$venv/.ready" ]; then
    say "making $venv (about two minutes, 3.5 GB)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
    say "PyTorch"
    quietly "${pip[@]}" "$torch"
    installed=$("$venv/bin/python" -W ignore -c 'import torch; print(torch.__version__)')
    echo "torch==$installed" > "$venv/constraint"
    echo "$nodeps" > "$venv/nodeps"
    echo "$others" > "$venv/others"
    say "SGLang $release"
    quietly "${pip[@]}" --no-deps -r "$venv/nodeps"
    say "what it needs on a CPU"
    quietly "${pip[@]}" -c "$venv/constraint" -r "$venv/others" hatchling editables
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    if ! "$venv/bin/python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
        cp -r "$here/sgl_kernel" "$here"/npr_torchvision_ops.* "$site/"
    fi
    touch "$venv/.ready"
fi

# The packages of this checkout, in an environment of its own that sees all of the other one.
own=$PWD/.sglang/$release
rm -rf "$own"
"$venv/bin/python" -m venv --without-pip "$own"
purelib='import sysconfig; print(sysconfig.get_paths()["purelib"])'
echo "import site; site.addsitedir('$("$venv/bin/python" -c "$purelib")')" > "$("$own/bin/python" -c "$purelib")/npr.pth"
quietly "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
    --ignore-installed --prefix "$own" libs/npr_sampling libs/npr_sglang
say "ready after $((SECONDS - started)) s"
echo "$own/bin/python"
