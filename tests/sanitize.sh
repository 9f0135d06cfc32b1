#!/bin/bash
# Builds pyddl._C with sanitizers and runs the kernels' tests on it: addresses and undefined behaviour, then threads.
# usage: tests/sanitize.sh PYTHON     (make sanitize)
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
export PATH="$(dirname "$python"):$PATH"

run() {
    local kinds=$1 options=$2 folder
    shift 2
    folder=$PWD/build/sanitize-${kinds%%,*}
    cmake -S . -B "$folder/cmake" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DCMAKE_CXX_FLAGS="-fsanitize=$kinds -fno-sanitize-recover=all -fno-omit-frame-pointer" \
        -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" > "$folder.log"
    cmake --build "$folder/cmake" >> "$folder.log"
    rm -rf "$folder/pyddl"
    cp -r pyddl "$folder/pyddl"
    rm -f "$folder"/pyddl/_C*.so
    cp "$folder"/cmake/_C*.so "$folder/pyddl/"
    local preload="" library
    for library in "$@" libstdc++.so; do preload+="$("${CXX:-g++}" -print-file-name="$library") "; done
    env $options PYTHONPATH="$folder" LD_PRELOAD="$preload" "$python" -m pytest -q -p no:cacheprovider \
        tests/unit/test_kernels.py tests/unit/test_kernels_bytes.py tests/unit/test_kernels_random.py -k "not torch"
}

mkdir -p build/sanitize-address build/sanitize-thread
run address,undefined "ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1" libasan.so libubsan.so
run thread "TSAN_OPTIONS=halt_on_error=1:die_after_fork=0" libtsan.so
