#!/bin/sh
# IGAL's state on SmolLM2-135M: degree, dim, rule, decay, key mixing, RoPE, groups, steps, kinds of needles, each trained at 1K and
# asked for needles at 1K to 8K, teacher-forced (docs/igal.md). One GPU, JOBS conversions at a time; none is begun after UNTIL
# seconds, and what was finished is not run again. TEXT: a .jsonl of books. Results: igal_sweep_PART.
#   TEXT=books.jsonl sh scripts/igal_sweep.sh
set -e
: "${TEXT:?}" "${DEVICE:=cuda}" "${JOBS:=4}" "${OUT:=sweep}" "${MODEL:=smollm2}" "${PARTS:=3}" "${UNTIL:=100000}" "${PROMPTS:=50}"
: "${TRAIN:=steps=200,rows=16,text_share=0.25}" "${KINDS:=multikey+manykeys+number+manykeys+words+code+uuid+friend}"
: "${LENGTHS:=1024, 4096, 8192}" "${BUDGET:=0.0625}" "${NAME:=igal_sweep}"
: "${VARIANTS:=
2x32-delta|degree=2,dim=32
4x9-sum|degree=4,dim=9,rule=sum
3x14-delta|degree=3,dim=14
4x9-delta|degree=4,dim=9
2x32-delta-mix4|degree=2,dim=32,mixing=4
2x32-delta-fewkeys|degree=2,dim=32|kinds=number+multikey+words+code+friend
2x32-sum|degree=2,dim=32,rule=sum
1x64-delta|degree=1,dim=64
2x16-delta|degree=2,dim=16
2x32-delta-rope|degree=2,dim=32,rope=true
2x32-delta-token|degree=2,dim=32,decay=token
2x32-delta-400|degree=2,dim=32|steps=400
4x12-sum|degree=4,dim=12,rule=sum
important-full|degree=2,dim=32||--control important-full
2x22-delta-12|degree=2,dim=22||--budget 0.125
4x9-sum-mix4|degree=4,dim=9,rule=sum,mixing=4
}"

if [ "$1" = one ]; then # NAME|LINEAR|TRAIN|MORE
  name=$(echo "$2" | cut -d'|' -f1) linear=$(echo "$2" | cut -d'|' -f2)
  train=$(echo "$2" | cut -d'|' -f3) more=$(echo "$2" | cut -d'|' -f4)
  [ -e "$OUT/$name" ] || [ "$(date +%s)" -ge "$STOP" ] || hybridize convert "$MODEL" --method igal --budget "$BUDGET" \
    --linear "$linear" --scores "$OUT/scores/scores.json" --train "$TRAIN,kinds=$KINDS${train:+,$train}" --train-text "$TEXT" \
    --lengths 1024 --test-prompts 4 --batch-tokens 65536 --device-map "$DEVICE" --out "$OUT/$name" $more \
    >"$OUT/$name.log" 2>&1 || echo "$name failed" >&2
  exit 0
fi
if [ "$1" = compare ]; then # PART
  entries=""
  for name in $(echo "$VARIANTS" | cut -d'|' -f1 | awk "NF && NR % $PARTS == $2"); do
    [ -e "$OUT/$name" ] && entries="$entries${entries:+, }{source: ./$name, name: $name}"
  done
  [ -n "$entries" ] || exit 0
  cat > "$OUT/compare-$2.yaml" <<END
model: $MODEL
match_at: 8192
select: {window: 64, sinks: 4}
prove:
  lengths: [$LENGTHS]
  prompts: $PROMPTS
  kinds: []
  ruler: [niah_single_2, niah_multikey_1]
  ruler_method: argmax
  perplexity_windows: 8
  text: evaluation
  batch_tokens: 262144
entries: [$entries]
END
  hybridize compare "$OUT/compare-$2.yaml" --device-map "$DEVICE" --out "$OUT/compared-$2" >"$OUT/compared-$2.log" 2>&1
  python scripts/keep_results.py "$OUT/compared-$2/compare.json" "${NAME}_$2"
  exit
fi
STOP=$(($(date +%s) + UNTIL))
export TRAIN TEXT DEVICE JOBS OUT MODEL PARTS STOP PROMPTS KINDS LENGTHS BUDGET VARIANTS NAME
mkdir -p "$OUT"
[ -e "$OUT/scores" ] ||
  hybridize score "$MODEL" --selector echo --prompts 32 --batch-tokens 32768 --device-map "$DEVICE" --out "$OUT/scores"
echo "$VARIANTS" | awk NF | tr '\n' '\0' | xargs -0 -P "$JOBS" -n 1 sh "$0" one
seq 0 $((PARTS - 1)) | xargs -P "$PARTS" -n 1 sh "$0" compare
