#!/bin/sh
# FlashMorph on SmolLM2-135M against other selectors, after the same distillation (docs/flashmorph.md). One GPU, some minutes a
# conversion, JOBS at a time; what was finished before a kill is not run again. TEXT: a .jsonl of books that is not among what is
# measured on. Gates of one seed serve every budget. One result a budget: flashmorph_smollm2_BUDGET.
#   TEXT=books.jsonl EVAL=eval BUDGETS=0.25 SELECTORS="gates periodic-0 nll" SEEDS=0 sh scripts/flashmorph_smollm2.sh
set -e
: "${TEXT:?}" "${EVAL:?}" "${BUDGETS:=0.5 0.25 0.1429}" "${SEEDS:=0}" "${DEVICE:=cuda}" "${JOBS:=4}" "${MODEL:=smollm2}"
: "${SELECTORS:=gates periodic-0 periodic-1 random-0 random-1 kl halo nll}" "${OUT:=flashmorph}" "${TRAIN:=}"
: "${LENGTHS:=1024, 2048, 4096, 8192}" "${PROMPTS:=50}" "${LIMIT:=500}"
: "${RULER:=niah_single_1, niah_single_2, niah_single_3, niah_multikey_1, vt}"
first=${BUDGETS%% *}

if [ "$1" = one ]; then # BUDGET SELECTOR SEED
  name="$3-$2-$4"
  more="--selector $3"
  [ "$3" != gates ] || [ "$2" = "$first" ] || more="--scores $OUT/gates-$first-$4/scores.json"
  [ -e "$OUT/$name" ] || hybridize convert "$MODEL" --method flashmorph --budget "$2" $more --prompts 32 --train "seed=$4$TRAIN" \
    --train-text "$TEXT" --lengths 1024 --test-prompts 20 --batch-tokens 32768 --device-map "$DEVICE" --out "$OUT/$name" \
    >"$OUT/$name.log" 2>&1
  exit
fi
if [ "$1" = compare ]; then # BUDGET
  entries=""
  for selector in $SELECTORS; do
    for seed in $SEEDS; do
      entries="$entries, {source: ./$selector-$2-$seed, name: $selector-$seed}"
    done
  done
  cat > "$OUT/compare-$2.yaml" <<END
model: $MODEL
match_at: 8192
prove:
  lengths: [$LENGTHS]
  prompts: $PROMPTS
  kinds: []
  ruler: [$RULER]
  choice: [$(ls -d "$(cd "$EVAL" && pwd)"/*.jsonl 2>/dev/null | paste -sd, -)]
  limit: $LIMIT
  text: evaluation
  batch_tokens: 131072
entries: [${entries#, }]
END
  hybridize compare "$OUT/compare-$2.yaml" --device-map "$DEVICE" --out "$OUT/compared-$2" >"$OUT/compared-$2.log" 2>&1
  python scripts/keep_results.py "$OUT/compared-$2/compare.json" "flashmorph_smollm2_$2"
  exit
fi
export TEXT EVAL BUDGETS SEEDS DEVICE JOBS MODEL SELECTORS OUT TRAIN LENGTHS PROMPTS LIMIT RULER
mkdir -p "$OUT"
asked() { # BUDGETS...
  for budget in "$@"; do
    for selector in $SELECTORS; do
      for seed in $SEEDS; do
        echo "one $budget $selector $seed"
      done
    done
  done
}
asked $first | xargs -P "$JOBS" -L 1 sh "$0" # whose gates the other budgets take
[ "$first" = "$BUDGETS" ] || asked ${BUDGETS#* } | xargs -P "$JOBS" -L 1 sh "$0"
printf "compare %s\n" $BUDGETS | xargs -P "$JOBS" -L 1 sh "$0"
