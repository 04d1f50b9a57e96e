#!/bin/sh
# IGAL on SmolLM2-135M against its controls, trained at 1K and measured to 32K (docs/igal.md). One GPU, about a minute a
# conversion, JOBS at a time; what was finished before a kill is not run again. TEXT: a .jsonl of books that is not among what is
# measured on. One result a budget: igal_smollm2_BUDGET.
#   TEXT=books.jsonl EVAL=eval BUDGETS="0.0625" CONTROLS="none all-window random-groups-0" SEEDS="0" sh scripts/igal_smollm2.sh
set -e
: "${TEXT:?}" "${EVAL:?}" "${BUDGETS:=0.0625 0.125 0.25}" "${SEEDS:=0}" "${DEVICE:=cuda}" "${STEPS:=200}" "${JOBS:=4}"
: "${CONTROLS:=none lowest random-groups-0 all-window all-wide important-wide important-full}"
: "${LINEAR:=degree=2,dim=32}" "${OUT:=igal}" "${MODEL:=smollm2}" "${KINDS:=words+code+friend+multikey}" "${TRAIN:=}"
: "${LENGTHS:=1024, 2048, 4096, 8192, 16384, 32768}" "${PROMPTS:=50}" "${LIMIT:=500}" "${WINDOWS:=8}"
: "${RULER:=niah_single_1, niah_single_2, niah_single_3, niah_multikey_1}"

if [ "$1" = one ]; then # BUDGET CONTROL SEED
  name="$3-$2-$4"
  more=""
  [ "$3" = none ] || more="--control $3"
  [ -e "$OUT/$name" ] || hybridize convert "$MODEL" --method igal --budget "$2" --linear "$LINEAR" $more \
    --scores "$OUT/scores/scores.json" --train "steps=$STEPS,kinds=$KINDS,seed=$4$TRAIN" --train-text "$TEXT" \
    --lengths 1024 --test-prompts 20 --batch-tokens 32768 --device-map "$DEVICE" --out "$OUT/$name" >"$OUT/$name.log" 2>&1
  exit
fi
if [ "$1" = compare ]; then # BUDGET
  entries="{source: base, rope: {rope_type: yarn, factor: 4}}, {source: base, rope: {rope_type: dynamic, factor: 4}}"
  for control in $CONTROLS; do
    for seed in $SEEDS; do
      entries="$entries, {source: ./$control-$2-$seed, name: $control-$2-$seed}"
    done
  done
  cat > "$OUT/compare-$2.yaml" <<END
model: $MODEL
match_at: 8192
select: {window: 64, sinks: 4}
prove:
  lengths: [$LENGTHS]
  beyond: true
  prompts: $PROMPTS
  kinds: []
  ruler: [$RULER]
  choice: [$(ls -d "$(cd "$EVAL" && pwd)"/*.jsonl 2>/dev/null | paste -sd, -)]
  limit: $LIMIT
  perplexity_windows: $WINDOWS
  text: evaluation
  batch_tokens: 131072
entries: [$entries]
END
  hybridize compare "$OUT/compare-$2.yaml" --device-map "$DEVICE" --out "$OUT/compared-$2" >"$OUT/compared-$2.log" 2>&1
  python scripts/keep_results.py "$OUT/compared-$2/compare.json" "igal_smollm2_$2"
  exit
fi
export TRAIN TEXT EVAL BUDGETS SEEDS DEVICE STEPS JOBS CONTROLS LINEAR OUT MODEL KINDS LENGTHS PROMPTS LIMIT WINDOWS RULER
mkdir -p "$OUT"
[ -e "$OUT/scores" ] ||
  hybridize score "$MODEL" --selector echo --prompts 32 --batch-tokens 32768 --device-map "$DEVICE" --out "$OUT/scores"
for budget in $BUDGETS; do
  for control in $CONTROLS; do
    for seed in $SEEDS; do
      echo "one $budget $control $seed"
    done
  done
done | xargs -P "$JOBS" -L 1 sh "$0"
printf "compare %s\n" $BUDGETS | xargs -P "$JOBS" -L 1 sh "$0"
