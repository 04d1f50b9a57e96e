"""`hybridize compare` on a tiny model: the table, significance, resume, the page, and clear errors."""

import functools
import json
import shutil
import types

import pytest
import torch
import yaml

import hybridize as hz
from conftest import make_base, make_plan, make_tokenizer
from hybridize import comparison
from hybridize.data import ruler
from hybridize.data.choice import load_items
from hybridize.data.ruler import cached_prompts, ruler_prompts
from hybridize.data.text import bundled_text
from hybridize.entries import entry_of, make_comparison, read_comparison
from hybridize.evaluation import suite
from hybridize.evaluation.estimate import estimate
from hybridize.evaluation.suite import Measure, Proof
from hybridize.report.comparison import headline, mark
from hybridize.scoring import scorers
from test_cli import Killed, run, short_text  # noqa: F401  a fixture
from test_report import CHROMIUM, browse

CHOICE = {"query": "Question: two?\nAnswer:", "choices": ["one", "a much longer one", "it"], "gold": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    base = make_base("llama")
    base.save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    make_plan(base, "window").save(folder / "mine.json")
    plan = make_plan(base, "window_full_decode")
    hz.convert(base, plan).save_pretrained(folder / "converted")
    make_tokenizer().save_pretrained(folder / "converted")
    plan.save(folder / "converted" / "plan.json")
    (folder / "converted" / "metrics.json").write_text(json.dumps({"conversion": {"tokens": 77, "seconds": 1.5}}))
    (folder / "gates.tsv").write_text("\n".join("\t".join(str((i * 7 + j * 3) % 10 / 10) for j in range(3)) for i in range(3)))
    (folder / "set.jsonl").write_text((json.dumps(CHOICE) + "\n") * 3)
    question = {
        "model": str(folder / "base"),
        "select": {"budget": 0.34, "window": 16, "sinks": 2, "prompts": 2, "lengths": [760]},
        "prove": {
            "lengths": "900,1300", "prompts": 2, "ruler": "niah_single_1,niah_multikey_2", "perplexity_windows": 1,
            "choice": ["set.jsonl"], "drift": 20, "drift_prompts": 2, "batch_tokens": 3000,
        },
        "contexts": [1000, 4000],
        "entries": [
            "drop", "periodic-1", "streaming", "snapkv", "mine.json", "converted", "gates.tsv",
            {"source": "mine.json", "without": "sinks", "name": "no sinks"},
            {"source": "duo", "select": {"batch_tokens": 760}},
        ],
    }  # fmt: skip
    (folder / "compare.yaml").write_text(yaml.safe_dump(question))
    return folder


def test_the_whole_way(capsys, material, tmp_path, monkeypatch):
    monkeypatch.setattr(scorers, "duo_scores", functools.partial(scorers.duo_scores, steps=3))
    code, out, err = run(capsys, "compare", material / "compare.yaml", "--out", tmp_path / "out")
    assert code == 0, err
    assert "measures to take" in out and "no sinks" in out
    made = json.loads((tmp_path / "out" / "compare.json").read_text())
    entries = {entry["name"]: entry for entry in made["entries"]}
    assert list(entries) == [
        "full", "drop", "periodic-1", "streaming", "snapkv", "mine", "converted", "gates", "no sinks", "duo",
    ]  # fmt: skip
    # equal bytes at the longest length
    budget = entries["periodic-1"]["cache_bytes"]["1300"]
    for name in ("drop", "streaming", "snapkv", "gates", "duo"):
        assert 0.95 * budget < entries[name]["cache_bytes"]["1300"] <= budget
        assert (
            hz.AttentionPlan.load(tmp_path / "out" / "plans" / f"{name}.json").cache_bytes(1000, 1, "float32")
            == (entries[name]["cache_bytes"]["1000"])
        )
    assert entries["drop"]["conversion"]["tokens"] == 2 * 760 and entries["drop"]["conversion"]["seconds"] > 0
    assert entries["converted"]["conversion"] == {"tokens": 77, "seconds": 1.5}
    assert entries["mine"]["conversion"] == {"tokens": None, "seconds": None}
    assert entries["no sinks"]["component"] == "sinks_off"
    rows = made["rows"]
    keys = {(r["task"], r["metric"], r["context"]) for r in rows}
    assert {("ruler_average", "score", n) for n in (900, 1300)} < keys
    assert {("niah_single_1", "score", 900), ("needle", "exact", 1300), ("set", "acc_norm", None)} < keys
    assert {("drift_text", "agreement", 20), ("drift_chain", "step_accuracy", 20)} < keys
    for row in rows:
        if row["selector"] == "full":
            assert "p" not in row and row["method"] == "base"
        else:
            base = next(
                r for r in rows if r["selector"] == "full"
                and all(r.get(k) == row.get(k) for k in ("task", "metric", "context", "depth", "positions"))
            )  # fmt: skip
            if row["metric"] not in ("perplexity", "gold_perplexity"):
                assert row["difference"] == pytest.approx(row["score"] - base["score"])
            assert 0 < row["p"] <= 1 and row["p"] <= row.get("p_holm", 1.0)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<figure data-chart=") == 4 and page.count('data-point="snapkv"') == 4
    if CHROMIUM:
        done = browse(tmp_path / "out" / "report.html", tmp_path, "--dump-dom")
        assert "CONSOLE" not in done.stderr
        for name in entries:
            assert f'data-entry="{name}"' in done.stdout and f'data-plan="{name}"' in done.stdout

    # again, killed in the middle: what was measured is not measured again, and the numbers are the same
    real, calls = comparison.measure, []

    def dies(run_folder, asked, name, *args, **kwargs):
        calls.append(name)
        if len(calls) == 3:
            raise Killed
        return real(run_folder, asked, name, *args, **kwargs)

    monkeypatch.setattr(comparison, "measure", dies)
    with pytest.raises(Killed):
        run(capsys, "compare", material / "compare.yaml", "--out", tmp_path / "again")
    capsys.readouterr()
    code, out, err = run(capsys, "compare", material / "compare.yaml", "--out", tmp_path / "again", "--json")
    assert code == 0, err
    again = json.loads(out)
    timed = ("conversion_seconds",)
    assert [{k: v for k, v in r.items() if k not in timed} for r in again["rows"]] == [
        {k: v for k, v in r.items() if k not in timed} for r in rows
    ]


def test_a_list_of_entries(capsys, material, tmp_path):
    words = ["compare", material / "mine.json", "all-window", "--model", material / "base", "--out", tmp_path / "out"]
    words += ["--window", 16, "--budget", 0.34, "--lengths", "900", "--test-prompts", 1, "--json"]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert [entry["name"] for entry in json.loads(out)["entries"]] == ["full", "mine", "all-window"]
    code, out, err = run(capsys, *words[:-1], "--dry-run", "--overwrite", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["estimate"]["tokens"] > 900


def test_eval_without_a_component(capsys, material, tmp_path):
    words = ["eval", material / "base", "--plan", material / "mine.json", "--out", tmp_path / "out", "--lengths", "900"]
    code, out, err = run(capsys, *words, "--test-prompts", 2, "--without", "sinks", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {r["selector"] for r in rows} == {"full", "hybrid", "hybrid without sinks"}
    assert {r["sinks"] for r in rows if r["selector"] == "hybrid without sinks"} == {0}
    code, _, err = run(capsys, *words, "--without", "gate", "--overwrite")
    assert code == 2 and "without" in err


BAD = {
    "no such entry": ({"entries": ["best"]}, "compare.entries"),
    "control out of range": ({"entries": ["periodic-77"]}, "compare.entries"),
    "two of one name": ({"entries": ["drop", "drop"]}, "names that differ"),
    "the base's name": ({"entries": [{"source": "drop", "name": "full"}]}, "names that differ"),
    "a path as name": ({"entries": [{"source": "drop", "name": "a/b"}]}, "names of letters"),
    "no entries": ({"entries": []}, "at least one"),
    "entries that are no list": ({"entries": "drop"}, "a list"),
    "unknown field": ({"enries": []}, "compare.enries"),
    "unknown proof field": ({"prove": {"promts": 3}}, "compare.prove.promts"),
    "unknown task": ({"prove": {"ruler": "niah"}}, "ruler"),
    "prompts 0": ({"prove": {"prompts": 0}}, "prompts"),
    "unknown select field": ({"entries": [{"source": "drop", "select": {"widow": 3}}]}, "widow"),
    "missing set": ({"prove": {"choice": ["none.jsonl"]}}, "choice"),
    "unknown component": ({"entries": [{"source": "mine.json", "without": "router"}]}, "without"),
    "beyond the context": ({"prove": {"lengths": [4000]}}, "trained context"),
    "no length to match at": ({"match_at": 0}, "match_at"),
    "no model": ({"model": None}, "compare.model"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_questions(capsys, material, tmp_path, case):
    change, expected = BAD[case]
    data = yaml.safe_load((material / "compare.yaml").read_text())
    data["prove"] = {"lengths": [900], "prompts": 1}
    data |= change
    for file in ("mine.json", "set.jsonl"):
        shutil.copy(material / file, tmp_path / file)
    if "entries" not in change:
        data["entries"] = ["all-window"]
    (tmp_path / "q.yaml").write_text(yaml.safe_dump(data))
    code, out, err = run(capsys, "compare", tmp_path / "q.yaml", "--out", tmp_path / "out")
    assert code == 2, (out, err)
    assert expected in err.replace("\n", " ") and err.startswith("error: ") and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_bad_files(tmp_path, material):
    for content, expected in (("[1, 2", "not YAML"), ("- a", "mapping")):
        (tmp_path / "q.yaml").write_text(content)
        with pytest.raises(hz.HybridizeError, match=expected):
            read_comparison(tmp_path / "q.yaml", {})
    with pytest.raises(hz.HybridizeError, match=r"\.yaml"):
        read_comparison(tmp_path / "none.yaml", {})
    with pytest.raises(hz.HybridizeError, match="match_at"):
        make_comparison("m", [entry_of("drop")], {}, {}, match_at=-1)


def test_marks():
    row = {"metric": "score", "difference": -0.2, "p": 0.001}
    assert mark(row) == "worse" and mark({**row, "difference": 0.2}) == "better"
    assert mark({**row, "p_holm": 0.06}) == "" and mark({"metric": "score"}) == ""
    assert mark({**row, "metric": "perplexity"}) == "better"
    assert headline([]) == []


# -- prompts on disk, and what a run will cost ----------------------------------------------------------------------


def test_prompts_are_made_once(tokenizer, tmp_path, monkeypatch):
    text = bundled_text("evaluation")[:6000]
    ask = dict(length=1900, seed=3, folder=tmp_path)
    first = cached_prompts(tokenizer, "vt", text, count=2, **ask)
    assert first == list(ruler_prompts(tokenizer, "vt", text, length=1900, count=2, seed=3))
    more = cached_prompts(tokenizer, "vt", text, count=4, **ask)
    assert more[:2] == first and more == list(ruler_prompts(tokenizer, "vt", text, length=1900, count=4, seed=3))

    def never(*_, **__):
        raise AssertionError("made again")

    (file,) = (tmp_path / "ruler").iterdir()
    monkeypatch.setattr(ruler, "ruler_prompts", never)
    assert cached_prompts(tokenizer, "vt", text, count=3, **ask) == more[:3]
    other = make_tokenizer()
    other.chat_template = "{{ messages[0]['content'] }}"
    for change in ({"seed": 4}, {"text": text + "x"}, {"tokenizer": other}, {"source": "file"}):
        asked = {"tokenizer": tokenizer, "text": text, "source": "", **ask, **change}
        with pytest.raises(AssertionError, match="made again"):
            cached_prompts(asked.pop("tokenizer"), "vt", asked.pop("text"), count=1, **asked)
    monkeypatch.undo()
    file.write_bytes(file.read_bytes()[:50])  # a broken file is made again, the same
    assert cached_prompts(tokenizer, "vt", text, count=2, **ask) == first


def test_estimate():
    model = hz.convert(make_base("llama"), make_plan(make_base("llama"), "full"))
    asked = [Measure("a", "x", 5000, 0, lambda *_: []), Measure("b", "x", 1000, 40, lambda *_: [])]
    made = estimate(model, asked, 1000, 200)
    assert (made.measures, made.tokens, made.steps) == (2, 6000, 40) and made.seconds > 0
    assert "6,000 tokens" in made.text()
    assert estimate(model, [], 1000, 200).seconds == 0
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"limit": 0}, "limit"),
        ({"view": -1}, "view"),
        ({"lengths": ()}, "lengths"),
        ({"choice": ("a/x.jsonl", "b/x.jsonl")}, "'x'"),
        ({"ruler_method": "sample"}, "ruler_method"),
        ({"ruler_method": "argmax", "ruler": ("vt",)}, "'vt'"),
        ({"ruler_method": "argmax", "qa": ("squad.json",)}, "squad"),
    ],
)
def test_bad_proofs(change, expected):
    with pytest.raises(hz.HybridizeError, match=expected):
        Proof(**change)


def test_tokenizer_without_padding_or_template(capsys, material, tmp_path):
    """No padding token, no chat template: rows that end early are filled with the end token, which decodes to nothing."""
    from hybridize.answers import greedy_texts

    model = hz.convert(make_base("mistral"), make_plan(make_base("mistral"), "mixed")).eval()
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    rows = [list(range(5, 25)), list(range(9, 40))]
    texts = greedy_texts(model, tokenizer, rows, [4, 9])
    alone = [greedy_texts(model, tokenizer, [row], [n])[0] for row, n in zip(rows, [4, 9])]
    assert texts == alone
    spy = types.SimpleNamespace(pad_token_id=None, eos_token_id=2, batch_decode=lambda ids, **_: ids)
    model.generation_config.eos_token_id = int(model(torch.tensor([rows[0]])).logits[0, -1].argmax())
    short, long = greedy_texts(model, spy, rows, [9, 9])
    assert {2} in (set(short[1:]), set(long[1:]))


def test_limits_reach_every_file_of_a_folder(tmp_path, tokenizer):
    for i in range(4):
        rows = [{"sentence_good": f"{i} {j} good", "sentence_bad": f"{i} {j} bad"} for j in range(10)]
        (tmp_path / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = suite._first(load_items(tmp_path), 8, spread=True)
    assert [item.pairs[0][1].split()[0] for item in items] == list("00112233")
    assert suite._first(list(range(5)), 3, spread=False) == [0, 1, 2] and suite._first([1], 3, spread=True) == [1]


def test_two_files_of_one_kind_are_refused(tmp_path, tokenizer):
    rows = [{"question": "Q", "answer": "A", "context": [["T", ["x."]]]}]
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    proof = Proof(qa=(str(tmp_path / "a.json"), str(tmp_path / "b.json")))
    with pytest.raises(hz.HybridizeError, match="at most one"):
        suite.measures(tokenizer, proof, lambda name, make: make())


# -- beyond the base's context --------------------------------------------------------------------------------------


def test_lengths_beyond_the_context(capsys, tmp_path):
    """The base is measured as far as it was trained, re-based windows and a stretched base further; nothing is invented."""
    folder = tmp_path / "short"
    make_base("llama", max_position_embeddings=640).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    asked = {
        "model": str(folder),
        "match_at": 600,
        "select": {"budget": 0.34, "window": 16, "sinks": 2},
        "prove": {"lengths": [600, 900], "prompts": 2, "perplexity_windows": 0, "beyond": True},
        "entries": [
            "streaming",
            {"source": "base", "rope": {"rope_type": "yarn", "factor": 2}},
            {"source": "base", "rope": {"rope_type": "dynamic", "factor": 2}},
        ],
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(asked))
    code, out, err = run(capsys, "compare", tmp_path / "c.yaml", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    rows = [row for row in json.loads(out)["rows"] if row["depth"] is None]
    found = {name: {row["context"] for row in rows if row["selector"] == name} for name in {row["selector"] for row in rows}}
    assert found == {"full": {600}, "streaming": {600, 900}, "base yarn x2": {600, 900}, "base dynamic x2": {600, 900}}
    assert all(("difference" in row) == (row["context"] == 600) for row in rows if row["selector"] != "full")
    dynamic = next(row for row in rows if row["selector"] == "base dynamic x2" and row["context"] == 600)
    assert dynamic["difference"] == 0  # it is the base, up to its own context
    asked["prove"]["beyond"] = False
    (tmp_path / "d.yaml").write_text(yaml.safe_dump(asked))
    code, _, err = run(capsys, "compare", tmp_path / "d.yaml", "--out", tmp_path / "no")
    assert code == 2 and "length: got '900 tokens', expected at most 640" in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ("base", "compare.entries.rope"),
        ({"source": "all-window", "rope": {"rope_type": "yarn", "factor": 2}}, "compare.entries.rope"),
        ({"source": "base", "rope": {"rope_type": "xpos", "factor": 2}}, "rope"),
        ({"source": "base", "rope": {"rope_type": "yarn", "factor": 0.5}}, "rope.factor"),
        ({"source": "base", "rope": {"rope_type": "yarn"}}, "rope"),
    ],
)
def test_bad_ropes(capsys, tmp_path, entry, field):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": "smollm2", "entries": [entry]}))
    code, _, err = run(capsys, "compare", tmp_path / "c.yaml", "--out", tmp_path / "out")
    assert code == 2 and f"error: {field}: got" in err, err
