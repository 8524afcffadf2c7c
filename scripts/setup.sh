#!/usr/bin/env bash
# Builds the virtual environment that the Makefile's targets use: scripts/setup.sh VENV [PYTHON]
#
# Without an NVIDIA GPU everything is installed at the versions in constraints/cpu.txt. With one, PyTorch's
# CUDA build is taken; a PyTorch 2.11 to 2.13 with CUDA that PYTHON has already is re-used, not installed again.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
wanted=${2:-}

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

suits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

python=
for name in ${wanted:-python3 python3.12 python3.11}; do
    if suits "$name"; then
        python=$name
        break
    fi
done
if [ -z "$python" ]; then
    found=$("${wanted:-python3}" --version 2>/dev/null || echo "none called ${wanted:-python3}")
    fail "needs Python 3.11 or 3.12, found $found; install one and name it: make test PYTHON=/path/to/python3.12"
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv (or name another: PYTHON=...)"

if nvidia-smi -L >/dev/null 2>&1 || [ -e /dev/nvidia0 ]; then
    constraints=constraints/cuda.txt
else
    constraints=constraints/cpu.txt
fi
printf 'setup: %s with %s into %s; the first time takes a few minutes\n' \
    "$("$python" --version)" "$constraints" "$venv" >&2

rm -f "$venv/.ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"

if [ "$constraints" = constraints/cuda.txt ]; then
    # A .pth line, not --system-site-packages: it also works when PYTHON is itself in a virtual environment.
    "$python" - "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'EOF'
import sys
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit()
if torch.version.cuda and (2, 11) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14):
    packages = Path(torch.__file__).parent.parent
    Path(sys.argv[1], "bakeoff-torch.pth").write_text(f"{packages}\n")
    print(f"setup: re-using PyTorch {torch.__version__} of {packages}", file=sys.stderr)
EOF
fi

"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile \
    --constraint "$constraints" --editable '.[dev]' ||
    fail "pip could not install bakeoff; its message is above. Repair that, then run the same command again"
# What pip would do on one core; a file that is no Python of this version, a template, is no failure.
"$venv/bin/python" -m compileall -q -j 0 \
    "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >/dev/null 2>&1 || true
"$venv/bin/python" -c 'import torch; print(f"setup: PyTorch {torch.__version__}", flush=True)' >&2
touch "$venv/.ready"
