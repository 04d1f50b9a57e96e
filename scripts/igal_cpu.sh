#!/bin/sh
# results/igal_cpu_*.json: IGAL on SmolLM2-135M on two CPU cores, and what it and its windows alone then find (docs/igal.md).
# TEXT: a .jsonl of books (ours: 35 public-domain ones, 5.8 MB). An hour or two; a killed run goes on where it was.
#   TEXT=books.jsonl sh scripts/igal_cpu.sh
set -e
: "${TEXT:?}"
train="steps=300,rows=4,length=512,save_every=50,kinds=number+code,text_share=0.25,branch_rate=1e-2"
for control in none all-window; do
  more=""
  [ $control = none ] || more="--control $control"
  [ -e "igal_cpu_$control" ] || hybridize convert smollm2 --method igal $more --out "igal_cpu_$control" --prompts 8 \
    --test-prompts 20 --lengths 512,1024,2048 --train "$train" --train-text "$TEXT"
done
python scripts/keep_results.py igal_cpu_none/metrics.json igal_cpu_smollm2
python scripts/keep_results.py igal_cpu_all-window/metrics.json igal_cpu_all_window
measure() { # NAME MATCH_AT LENGTHS PROMPTS KINDS BEYOND
  cat > "igal_cpu_$1.yaml" <<END
model: smollm2
match_at: $2
select: {window: 64, sinks: 4}
prove: {lengths: [$3], prompts: $4, kinds: [$5], perplexity_windows: 0, batch_tokens: 4096, beyond: $6}
entries: [{source: igal_cpu_none, name: IGAL}]
END
  [ -e "igal_cpu_$1" ] || hybridize compare "igal_cpu_$1.yaml" --out "igal_cpu_$1"
  python scripts/keep_results.py "igal_cpu_$1/compare.json" "igal_cpu_$1"
}
measure long 8192 "4096, 8192, 16384" 10 number true
measure multikey 1024 1024 20 multikey false
measure unseen 1024 1024 20 "words, friend" false
