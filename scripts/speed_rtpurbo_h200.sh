#!/bin/sh
# results/speed_rtpurbo_h200.json on one H200 (docs/rtpurbo.md): 15 % of the query heads retrieve, the others see 8192 + 4 tokens.
# SHAPE: qwen3-30b-heads (32 query heads, 4 groups, the source's) or llama-3.1-8b (32, 8).
set -e
: "${SHAPE:=qwen3-30b-heads}" "${CONTEXTS:=8192+16384+32768+131072+1048576}"
out="speed_rtpurbo_$SHAPE"
hybridize bench --shape "$SHAPE" --budget 0.15 --window 8192 --sinks 4 --seconds 0.3 --parts "indexed:$CONTEXTS" --out "$out"
name=speed_rtpurbo_h200
[ "$SHAPE" = qwen3-30b-heads ] || name="speed_rtpurbo_h200_$SHAPE"
python scripts/keep_results.py "$out/bench.json" "$name"
