#!/bin/sh
# Create or repair .venv and install exactly what requirements.lock says, plus this
# project in editable form. Safe to interrupt and to run again: the stamp that the
# Makefile looks at is written last.
#
#   PYTHON=python3.12       the interpreter to build .venv from
#   TORCH_INDEX_URL=URL     take torch from this index (a CPU or ROCm build) instead of
#                           the default CUDA build, which is about 3 GB
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
uv_version=0.13.9

say() { printf '%s\n' "$*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    say "setup: $python is missing or older than 3.11; install Python 3.11+ or set PYTHON=/path/to/python3.11"
    exit 1
}
if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    rm -rf .venv
    "$python" -m venv .venv || {
        rm -rf .venv
        say "setup: could not create .venv; on Debian or Ubuntu: apt-get install python3-venv"
        exit 1
    }
fi
if [ "$(.venv/bin/uv --version 2>/dev/null | cut -d' ' -f2)" != "$uv_version" ]; then
    say "setup: installing uv $uv_version"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
fi
export VIRTUAL_ENV="$PWD/.venv"
lock=requirements.lock
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    torch=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements.lock)
    say "setup: installing $torch from TORCH_INDEX_URL"
    # Alone: the lock, with its hashes, brings what it depends on.
    .venv/bin/uv pip install --quiet --no-deps --index-url "$TORCH_INDEX_URL" "$torch" || {
        say "setup: TORCH_INDEX_URL=$TORCH_INDEX_URL gave no $torch for this machine; mend or unset it"
        exit 1
    }
    # Everything but torch and what only its CUDA build needs.
    lock=.venv/requirements.lock
    awk '/^[^ #]/ { skip = /^(torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z]*)==/ } !skip' requirements.lock > "$lock"
else
    say "setup: installing locked dependencies (torch's CUDA build is about 3 GB the first time; TORCH_INDEX_URL takes another)"
fi
.venv/bin/uv pip install --require-hashes -r "$lock"
.venv/bin/uv pip install --quiet --no-deps --no-build-isolation -e .
touch .venv/.installed
