#!/bin/sh
# results/speed_flashmorph_h200.json on one H200 (docs/flashmorph.md): 7 of 28 layers full, the others linear.
set -e
hybridize bench --shape qwen3-1.7b --method flashmorph --window 64 --sinks 4 --seconds 0.3 --out speed_flashmorph \
  --parts decode:1024+262144+524288,prefill:131072+262144
python scripts/keep_results.py speed_flashmorph/bench.json speed_flashmorph_h200
