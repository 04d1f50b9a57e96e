"""Keep a run's numbers in results/: another name, and no folder of the machine they were made on.

python scripts/keep_results.py RUN/metrics.json base_smollm2
"""

import json
import re
import sys
from pathlib import Path

from hybridize.files import write_json

source, name = Path(sys.argv[1]), sys.argv[2]
data = json.loads(source.read_text()) | {"name": name}
data["command"] = re.sub(r"/\S*/(?=\S)", "", data["command"])
for entry in data.get("entries", []):
    entry["source"] = Path(entry["source"]).name
if "text" in data.get("asked", {}):
    data["asked"]["text"] = Path(data["asked"]["text"]).name
for field in ("choice", "perplexity", "long", "qa"):
    if field in data.get("prove", {}):
        data["prove"][field] = [Path(file).name for file in data["prove"][field]]
write_json(Path(__file__).resolve().parent.parent / "results" / f"{name}.json", data)
