#!/usr/bin/env bash
# What this machine's GPU makes of the library, in 15 minutes and without a network: writes one file of figures, to send.
#     scripts/gpu_smoke.sh assets/hf/Qwen3-0.6B [--out FILE] [--only STEP ...] [--minutes 15]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=.venv/bin/python
[ -x "$PYTHON" ] || PYTHON=python
exec "$PYTHON" scripts/gpu_smoke.py "$@"
