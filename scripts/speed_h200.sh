#!/bin/sh
# results/speed_window_h200.json on one H200, about 6 minutes (docs/speed.md); a killed run goes on where it was.
set -e
hybridize bench --shape llama-3.1-8b --backward --seconds 0.3 --out speed \
  --parts attention:131072,decode:1024+131072+524288,prefill:131072+262144,ragged:32768,batch:32768
python scripts/keep_results.py speed/bench.json speed_window_h200
