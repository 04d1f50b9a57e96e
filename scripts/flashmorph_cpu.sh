#!/bin/sh
# results/flashmorph_cpu_*.json: gates of SmolLM2-135M on two CPU cores at a hundredth of the planned tokens, and evenly spaced
# layers beside them (docs/flashmorph.md). TEXT: a .jsonl of books (ours: 35 public-domain ones, 5.8 MB). Under an hour.
#   TEXT=books.jsonl sh scripts/flashmorph_cpu.sh
set -e
: "${TEXT:?}"
train="branches.steps=30,branches.rows=4,branches.length=256,gates.steps=60,gates.rows=2,gates.length=512,gates.warmup=0"
train="$train,distil.steps=30,distil.rows=4,distil.length=256,distil.watch=0,save_every=10"
for selector in gates periodic-0; do
  [ -e "fm_$selector" ] || hybridize convert smollm2 --method flashmorph --budget 0.2667 --selector $selector --out "fm_$selector" \
    --test-prompts 10 --lengths 512 --batch-tokens 2048 --length 512 --prompts 8 --train "$train" --train-text "$TEXT"
done
[ -e fm_compared ] || hybridize compare fm_gates fm_periodic-0 --model smollm2 --lengths 512,1024,2048 --test-prompts 20 \
  --match-at 2048 --batch-tokens 4096 --out fm_compared
python scripts/keep_results.py fm_gates/metrics.json flashmorph_cpu_gates
python scripts/keep_results.py fm_compared/compare.json flashmorph_cpu_compared
