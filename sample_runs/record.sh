#!/bin/sh
# Records the sample runs: `make sample-runs`. Same data and seed; the first four differ in the balancer alone.
# The samples are replaced only once all of them have been recorded anew.
set -eu
cd "$(dirname "$0")"
routescope=${ROUTESCOPE:-routescope}
fresh=.recording
rm -rf "$fresh"

record() {
    "$routescope" record --out "$fresh" --seed 0 --steps 400 "$@"
}
record --run-id none --name "No balancer" --balancer none
record --run-id aux-loss --name "Aux loss" --balancer aux --aux-coef 0.01
record --run-id sign-bias --name "Sign bias" --balancer sign-bias --bias-rate 0.001
record --run-id quantile --name "Quantile" --balancer quantile
record --run-id top2-shared --name "Top-2 of 8, one shared" --balancer quantile \
    --num-experts 8 --top-k 2 --num-shared-experts 1

for run in "$fresh"/*/; do
    rm -rf "./$(basename "$run")"
    mv "$run" .
done
rmdir "$fresh"
