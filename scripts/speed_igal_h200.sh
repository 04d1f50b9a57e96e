#!/bin/sh
# results/speed_igal_h200.json on one H200 (docs/igal.md): 16 of 256 groups linear, windows of 64 + 4 everywhere.
set -e
hybridize bench --shape llama-3.1-8b --linear default --budget 0.0625 --window 64 --sinks 4 --seconds 0.5 --out speed_igal \
  --parts decode:1024+32768,prefill:32768+131072,batch:32768
python scripts/keep_results.py speed_igal/bench.json speed_igal_h200
