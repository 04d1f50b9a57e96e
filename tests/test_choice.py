"""Scored continuations against sums written out, the file kinds, and both in `hybridize eval`."""

import json

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_plan, make_tokenizer
from hybridize.data.choice import Item, continuation_prompt, load_items
from hybridize.evaluation.choice import choice_cells, choice_results
from test_cli import run, short_text  # noqa: F401  a fixture

ROWS = {
    "choices": {"query": "Question: two?\nAnswer:", "choices": ["one", "a much longer one", "it"], "gold": 2},
    "winogrande": {"sentence": "Ann beat Bob so _ was glad.", "option1": "Ann", "option2": "Bob", "gold": 0},
    "lambada": {"context": "the end of the", "continuation": " story"},
    "blimp": {"sentence_good": "The cats run.", "sentence_bad": "The cats runs."},
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_items(tmp_path):
    (choice, wino, lambada, blimp) = load_items(write(tmp_path / "all.jsonl", *ROWS.values()))
    assert choice.pairs[1] == ("Question: two?\nAnswer:", " a much longer one") and choice.gold == 2
    assert wino.pairs == (("Ann beat Bob so Ann", " was glad."), ("Ann beat Bob so Bob", " was glad."))
    assert lambada == Item((("the end of the", " story"),), 0)
    assert blimp.pairs == (("", "The cats run."), ("", "The cats runs."))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"query": "x", "choices": ["a"], "gold": 1}, "gold"),
        ({"query": "x", "choices": ["a"]}, "gold"),
        ({"sentence": "no blank", "option1": "a", "option2": "b", "gold": 0}, "no words behind"),
        ({"text": "x"}, "expected query/choices/gold"),
    ],
)
def test_bad_rows_name_their_line(tmp_path, row, expected):
    with pytest.raises(hz.HybridizeError, match=f"line 2.*{expected}"):
        load_items(write(tmp_path / "bad.jsonl", ROWS["blimp"], row))
    with pytest.raises(hz.HybridizeError, match="at least one row"):
        load_items(write(tmp_path / "empty.jsonl"))
    with pytest.raises(hz.HybridizeError, match="existing"):
        load_items(tmp_path / "none.jsonl")


def test_spaces_belong_to_the_continuation(tokenizer):
    prompt = continuation_prompt(tokenizer, "a b ", "c")
    assert tokenizer.decode(prompt.ids[prompt.prompt_len :]) == " c"
    empty = continuation_prompt(tokenizer, "", "xy")
    assert (empty.ids[0], empty.prompt_len) == (tokenizer.bos_token_id, 1)


def naive(model, tokenizer, context, continuation):
    """Log probability and greediness of one continuation, by one run and plain indexing."""
    prompt = continuation_prompt(tokenizer, context, continuation)
    # a plan that decodes with full attention reads a continuation as decoded
    phase = {"prompt_len": torch.tensor([prompt.prompt_len])} if hasattr(model, "plan") else {}
    with torch.no_grad():
        logits = model(torch.tensor([prompt.ids]), **phase).logits[0].log_softmax(-1)
    places = range(prompt.prompt_len, len(prompt.ids))
    total = sum(float(logits[i - 1, prompt.ids[i]]) for i in places)
    return total, all(int(logits[i - 1].argmax()) == prompt.ids[i] for i in places)


@pytest.mark.parametrize("batch_tokens", [1, 10**6])
def test_results_are_sums_of_log_probabilities(tokenizer, batch_tokens):
    base = make_base("qwen3")
    model = hz.convert(base, make_plan(base, "mixed")).eval()
    texts = ["one", "two words", "it", "the very long answer", "x"]
    items = [Item(tuple((f"Q{i}:", f" {t}{i}") for t in texts[: 2 + i % 4]), i % 2) for i in range(8)]
    results = choice_results(model, tokenizer, items, batch_tokens=batch_tokens)
    for item, result in zip(items, results):
        sums = [naive(model, tokenizer, *pair)[0] for pair in item.pairs]
        shares = [s / (len(pair[1]) - 1) for s, pair in zip(sums, item.pairs)]
        assert result["acc"] == (sums.index(max(sums)) == item.gold)
        assert result["acc_norm"] == (shares.index(max(shares)) == item.gold)
        assert result["gold_nats"] == pytest.approx(sums[item.gold], abs=1e-3)
    assert len({r["acc"] for r in results}) == 2  # some right, some wrong: the comparison says something
    rows = [cell.row() for cell in choice_cells("set", results)]
    assert [row["metric"] for row in rows] == ["acc", "acc_norm"]
    assert rows[0]["score"] == sum(r["acc"] for r in results) / 8 and rows[0]["low"] < rows[0]["score"] < rows[0]["high"]


def test_one_continuation_is_right_where_greedy_decoding_writes_it(tokenizer):
    model = make_base("qwen3")
    letters = [chr(i) for i in range(33, 127)]
    items = [Item(((context, letter),), 0) for context in "abcdefgh" for letter in letters]
    results = choice_results(model, tokenizer, items)
    greedy = [naive(model, tokenizer, *item.pairs[0])[1] for item in items]
    assert [r["acc"] for r in results] == [r["acc_norm"] for r in results] == greedy
    assert 0 < sum(greedy) <= 8


def test_eval_with_ruler_and_choice(capsys, tmp_path):
    base = tmp_path / "base"
    make_base("llama").save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    sets = [write(tmp_path / f"{name}.jsonl", row, row) for name, row in ROWS.items()]
    words = ["eval", base, "--out", tmp_path / "out", "--test-prompts", 1, "--lengths", "900"]
    words += ["--ruler", "niah_single_1,vt", "--limit", 1]
    for file in sets:
        words += ["--choice", file]
    code, _, err = run(capsys, *words, "--json")
    assert code == 2 and "length" in err  # vt does not fit into 900 byte tokens
    words[words.index("900")] = "1900"
    code, out, err = run(capsys, *words, "--overwrite")
    assert code == 0, err
    assert "niah_single_1" in out and "winogrande" in out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    found = {(r["task"], r["metric"]): r["n"] for r in metrics["rows"] if r["selector"] == "full"}
    assert found["niah_single_1", "score"] == found["vt", "score"] == 1
    assert all(
        found[name, metric] == 1 for name in ROWS for metric in ("acc", "gold_perplexity" if name == "lambada" else "acc_norm")
    )
    assert 'data-task="lambada"' in (tmp_path / "out" / "report.html").read_text()
    code, _, err = run(capsys, "eval", base, "--out", tmp_path / "o", "--ruler", "magic")
    assert code == 2 and "ruler" in err
