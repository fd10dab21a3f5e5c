#!/usr/bin/env bash
# Makes an environment with SGLang for the CPU and the plug-in, once for all checkouts: setup-sglang.sh PYTHON [RELEASE]
# Prints the path of its Python. It lies in NPR_SGLANG_HOME (the user's cache folder unless set), under a name that
# depends on all that is installed; the packages of this checkout are installed into it each time.
# What a release needs otherwise than the default one is in sglang_cpu/RELEASE.
set -euo pipefail
shopt -s nullglob
python=$1
here=scripts/sglang_cpu
default=$(sed -n 's/^sglang==//p' "$here/requirements-nodeps.txt")
release=${2:-$default}
own=$here/$release
if [ "$release" != "$default" ] && [ ! -d "$own" ]; then
    known=("$here"/*/requirements.txt)
    echo "setup-sglang.sh knows no SGLang $release: give $default $(basename -a "${known[@]%/*}" | xargs)" >&2
    exit 2
fi

# A package a line; what the release has of its own replaces what the default has.
requirements() {
    awk -F== '/^[^#]/ { line[tolower($1)] = $0 } END { for (name in line) print line[name] }' \
        "$here/$1" $(ls "$own/$1" 2>/dev/null) | sort
}

torch=$(grep '^torch==' constraints.txt)
nodeps=$(requirements requirements-nodeps.txt)
others=$(requirements requirements.txt)
version=$(cat <(echo "$nodeps $others $torch") "$here"/*.py "$here"/sgl_kernel/*.py | sha256sum | cut -c1-12)
venv=${NPR_SGLANG_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/npr}/sglang-$release-$version

say() { printf '\033[1m[sglang]\033[0m %s\n' "$*" >&2; }

started=$SECONDS
if [ ! -e "$venv/.ready" ]; then
    say "making $venv (about two minutes, 3.5 GB)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" "$torch"
    installed=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    echo "torch==$installed" > "$folder/constraint"
    echo "$nodeps" > "$folder/nodeps"
    echo "$others" > "$folder/others"
    "${pip[@]}" --no-deps -r "$folder/nodeps"
    "${pip[@]}" -c "$folder/constraint" -r "$folder/others" hatchling editables
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    if ! "$venv/bin/python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
        cp -r "$here/sgl_kernel" "$here"/npr_torchvision_ops.* "$site/"
    fi
    touch "$venv/.ready"
fi
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
    --force-reinstall libs/npr_sampling libs/npr_sglang
say "ready after $((SECONDS - started)) s"
echo "$venv/bin/python"
