#!/bin/sh
# Head scores against random groups at the cache bytes of 5, 8 and 15 of 30 layers (docs/scores.md): CPU, an hour.
set -e
for budget in 0.15 0.25 0.5; do
  more=""
  if [ $budget = 0.25 ]; then
    more=", {name: drop by group, source: drop, select: {unit: group, prompts: 8}}, random-groups-1"
  fi
  cat > scores_$budget.yaml <<END
model: smollm2
match_at: 2048
select: {budget: $budget, window: 128, sinks: 4, prompts: 16, lengths: [1024], batch_tokens: 2048}
prove: {lengths: [1024, 2048], prompts: 20, kinds: [number], perplexity_windows: 0, batch_tokens: 4096}
entries: [echo, retrieval, reasoning, random-groups-0$more]
END
  hybridize compare scores_$budget.yaml --out scores_$budget
done
