#!/usr/bin/env bash
# Writes one file of figures, to send: what this machine's GPU makes of the library, in half an hour
# and without a network.
#     scripts/gpu_smoke.sh assets/hf/Qwen3-0.6B [--out FILE] [--only STEP ...] [--minutes 30]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=.venv/bin/python
[ -x "$PYTHON" ] || PYTHON=python
exec "$PYTHON" scripts/gpu_smoke.py "$@"
