#!/usr/bin/env bash
# The kernels and a whole model on a GPU: see benchmarks/gpu_check.py.
#   scripts/gpu_check.sh --kernels | --model      at most 5 minutes each, on a bare machine with torch and triton
#   scripts/gpu_check.sh --dry [--kernels | --model]      the same code with tiny shapes, on the CPU in the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
case " $* " in
  *" --dry "*) export TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1 ;;
  *) unset TRITON_INTERPRET ;;
esac
exec timeout "${GPU_CHECK_TIMEOUT:-300}" "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
