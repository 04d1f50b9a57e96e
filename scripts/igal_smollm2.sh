#!/bin/sh
# IGAL on SmolLM2-135M against its controls, trained at 1K and measured to 32K (docs/igal.md). One GPU, about a minute a
# conversion; each stops where it was killed and goes on. TEXT: a .jsonl of books that is not among what is measured on.
#   TEXT=books.jsonl EVAL=eval BUDGETS="0.0625" CONTROLS="none all-window random-groups-0" SEEDS="0" sh scripts/igal_smollm2.sh
set -e
: "${TEXT:?}" "${EVAL:?}" "${BUDGETS:=0.0625 0.125 0.25}" "${SEEDS:=0}" "${DEVICE:=cuda}" "${STEPS:=200}"
: "${CONTROLS:=none lowest random-groups-0 all-window all-wide important-wide important-full}"
: "${LINEAR:=degree=2,dim=32}" "${OUT:=igal}"
mkdir -p "$OUT"
[ -e "$OUT/scores" ] || hybridize score smollm2 --selector echo --prompts 32 --batch-tokens 32768 --device-map "$DEVICE" --out "$OUT/scores"
entries=""
for budget in $BUDGETS; do
  for control in $CONTROLS; do
    for seed in $SEEDS; do
      name="$control-$budget-$seed"
      more=""
      [ "$control" = none ] || more="--control $control"
      entries="$entries, {source: $name, name: $name}"
      [ -e "$OUT/$name" ] || hybridize convert smollm2 --method igal --budget "$budget" --linear "$LINEAR" $more \
        --scores "$OUT/scores/scores.json" --train "steps=$STEPS,kinds=words+code+friend+multikey,seed=$seed" \
        --train-text "$TEXT" --lengths 1024 --test-prompts 20 --batch-tokens 32768 --device-map "$DEVICE" --out "$OUT/$name"
    done
  done
done
cat > "$OUT/compare.yaml" <<END
model: smollm2
match_at: 8192
select: {window: 64, sinks: 4}
prove:
  lengths: [1024, 2048, 4096, 8192, 16384, 32768]
  beyond: true
  prompts: 50
  kinds: []
  ruler: [niah_single_1, niah_single_2, niah_single_3, niah_multikey_1]
  choice: [$(ls -d "$EVAL"/*.jsonl 2>/dev/null | sed "s|^|$(pwd)/|" | paste -sd, -)]
  limit: 500
  perplexity_windows: 8
  text: evaluation
  batch_tokens: 131072
entries: [{source: base, rope: {rope_type: yarn, factor: 4}}, {source: base, rope: {rope_type: dynamic, factor: 4}}$entries]
END
hybridize compare "$OUT/compare.yaml" --device-map "$DEVICE" --out "$OUT/compared"
python scripts/keep_results.py "$OUT/compared/compare.json" igal_smollm2
