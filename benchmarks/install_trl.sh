#!/bin/sh
# TRL, into a virtual environment of its own: benchmarks/small_step.py runs its GRPOTrainer beside ours. A minute and
# 1 GB. Does nothing when it is there.
set -eu
here=$(dirname "$0")
. "$here/engine_environment.sh"
folder=${1:-$HOME/.cache/polyrl/engines/trl}
version=1.16.0
is_installed "$folder" trl "$version" && exit 0

make_environment "$folder"
install "trl==$version"
mark_installed "$folder" trl "$version"
