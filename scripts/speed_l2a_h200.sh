#!/bin/sh
# results/speed_l2a_h200.json on one H200 (docs/l2a.md): every fifth token open in every layer, windows of 4096 without sinks.
set -e
hybridize bench --shape llama-3.1-8b --method l2a --budget 0.2 --window 4096 --sinks 0 --backward --no-stock --seconds 0.3 \
  --parts attention:131072,prefill:131072 --out speed_l2a
python scripts/keep_results.py speed_l2a/bench.json speed_l2a_h200
