#!/usr/bin/env bash
# Makes an environment with SGLang for the CPU and the plug-in, once for all checkouts: setup-sglang.sh PYTHON
# Prints the path of its Python. It lies in NPR_SGLANG_HOME (the user's cache folder unless set), under a name that
# depends on all that is installed; the packages of this checkout are installed into it each time.
set -euo pipefail
python=$1
here=scripts/sglang_cpu
torch=$(grep '^torch==' constraints.txt)
version=$(cat "$here"/requirements*.txt "$here"/*.py "$here"/sgl_kernel/*.py <(echo "$torch") | sha256sum | cut -c1-12)
venv=${NPR_SGLANG_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/npr}/sglang-$version

say() { printf '\033[1m[sglang]\033[0m %s\n' "$*" >&2; }

started=$SECONDS
if [ ! -e "$venv/.ready" ]; then
    say "making $venv (about two minutes, 3.5 GB)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" "$torch"
    installed=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')
    constraint=$(mktemp)
    trap 'rm -f "$constraint"' EXIT
    echo "torch==$installed" > "$constraint"
    "${pip[@]}" --no-deps -r "$here/requirements-nodeps.txt"
    "${pip[@]}" -c "$constraint" -r "$here/requirements.txt" hatchling editables
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
