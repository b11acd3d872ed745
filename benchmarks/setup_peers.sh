#!/usr/bin/env bash
# Make .venv-bench: knowable and the peers it is compared with, in an environment of their own. PYTHON chooses the Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"${PYTHON:-python3}" -m venv .venv-bench
install=(.venv-bench/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt)
"${install[@]}" "torch==$(sed -n 's/^torch==//p' constraints.txt)" -e ".[serve]"
# Without their own requirements, which would bring torchvision, CUDA packages and experiment trackers.
"${install[@]}" --no-deps -r benchmarks/requirements-peers.txt
.venv-bench/bin/python -m benchmarks.run step_time --quick --case mlp
.venv-bench/bin/python -m benchmarks.run effective_samples --quick --case toy
