"""LongBench and LongMemEval files, RULER's question tasks from files, and long generation."""

import json
import random

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_plan
from hybridize.data.longtext import load_long, long_prompt
from hybridize.data.questions import load_questions
from hybridize.evaluation.drift import (
    base_path,
    chain_cell,
    chain_prompt,
    drift_prompts,
    free_chain,
    path_cells,
    path_choices,
)
from hybridize.evaluation.longtext import contains, edit, f1, long_answers, long_cells, long_score, number, rouge_l

BENCH = {"dataset": "hotpotqa", "context": "Ann is tall. " * 40, "input": "Who is tall?", "answers": ["Ann", "Ann B."]}
MEMORY = {
    "question": "What do I like?",
    "answer": "green tea",
    "question_type": "single-session-user",
    "haystack_dates": ["2023/05/01", "2023/05/02"],
    "haystack_sessions": [[{"role": "user", "content": "I like green tea."}], [{"role": "user", "content": "Hello."}]],
}


def write(path, data):
    path.write_text(data if isinstance(data, str) else "".join(json.dumps(row) + "\n" for row in data))
    return path


def test_longbench(tmp_path, tokenizer):
    (item,) = load_long(write(tmp_path / "a.jsonl", [BENCH]))
    assert (item.task, item.metric, item.references, item.new_tokens) == ("hotpotqa", "f1", ("Ann", "Ann B."), 32)
    whole = tokenizer.decode(long_prompt(tokenizer, item, 2000))
    assert BENCH["context"] in whole and whole.rstrip().endswith("Answer:")
    cut = tokenizer.decode(long_prompt(tokenizer, item, 300))
    assert len(long_prompt(tokenizer, item, 300)) == 300 - 32  # the middle of the context is left out
    assert "Answer the question from the text" in cut and "Question: Who is tall?" in cut and "Ann is tall. Ann" in cut
    with pytest.raises(hz.HybridizeError, match="length"):
        long_prompt(tokenizer, item, 60)


def test_longmemeval(tmp_path, tokenizer):
    (item,) = load_long(write(tmp_path / "a.json", json.dumps([MEMORY])))
    text = tokenizer.decode(long_prompt(tokenizer, item, 2000))
    assert item.task == "longmemeval_single-session-user" and item.metric == "contains"
    assert text.index("[2023/05/01]\nuser: I like green tea.") < text.index("[2023/05/02]") < text.index("What do I like?")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", [{**BENCH, "dataset": "vcsum"}], "dataset"),
        ("a.jsonl", [BENCH, {"input": "x"}], "row 2"),
        ("a.jsonl", [{**BENCH, "answers": []}], "answers"),
        ("a.jsonl", "", "at least one row"),
        ("a.jsonl", "{", "not JSON"),
        ("a.json", json.dumps([{**MEMORY, "haystack_dates": ["x"]}]), "row 1"),
    ],
)
def test_bad_files(tmp_path, name, content, expected):
    with pytest.raises(hz.HybridizeError, match=expected):
        load_long(write(tmp_path / name, content))
    with pytest.raises(hz.HybridizeError, match="existing"):
        load_long(tmp_path / "none.jsonl")


def test_scores():
    assert f1("The cat, sat!", "cat sat") == 1.0 and f1("a dog", "the cat") == 0.0
    assert f1("cat dog bird", "cat fish") == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert rouge_l("a b c d", "a x c d") == pytest.approx(2 * 0.75 * 0.75 / 1.5)
    assert contains("You like Green Tea.", "green tea") == 1.0 and contains("greener teas", "green tea") == 0.0
    assert number("paragraph 12 and 3", "Paragraph 12") == 0.5 and number("none", "Paragraph 12") == 0.0
    assert edit("\n# note\nx = 1\ny", "x = 1") == 1.0 and edit("", "x = 1") == 0.0


def test_few_shot_tasks_and_classes(tmp_path):
    rows = [
        {**BENCH, "dataset": "trec", "answers": ["Sport team"], "all_classes": ["Sport", "Sport team", "City"]},
        {**BENCH, "dataset": "triviaqa"},
    ]
    trec, trivia = load_long(write(tmp_path / "a.jsonl", rows))
    assert long_score(trec, "\nSport team\nQuestion") == 1.0
    assert long_score(trec, "Sport") == 0.0 and long_score(trec, "Sport team or City") == 0.5
    assert long_score(trivia, "Ann\nQuestion: Bob") == 1.0


def test_answers_keep_their_order(tmp_path, tokenizer):
    rows = [{**BENCH, "dataset": name, "context": c * 60} for name in ("hotpotqa", "qasper", "lcc") for c in "ab"]
    items = load_long(write(tmp_path / "a.jsonl", rows))
    base = make_base("mistral")
    model = hz.convert(base, make_plan(base, "mixed")).eval()
    together = long_answers(model, tokenizer, items, 600, batch_tokens=10**6)
    assert together == [long_answers(model, tokenizer, [item], 600)[0] for item in items]
    assert len(set(together)) > 1
    cells = long_cells(items, together)
    assert [(c.task, c.metric, len(c.values)) for c in cells] == [
        ("hotpotqa", "f1", 2),
        ("qasper", "f1", 2),
        ("lcc", "edit", 2),
    ]


def test_questions_from_files(tmp_path):
    qa = {"question": "Who?", "answers": [{"text": "Ann"}, {"text": "Ann"}, {"text": "A."}]}
    none = {"question": "What?", "answers": []}
    squad = {"data": [{"paragraphs": [{"context": f"p{i}", "qas": [qa, none]} for i in range(4)]}]}
    name, task = load_questions(write(tmp_path / "s.json", json.dumps(squad)))
    made = task.build(random.Random(0), 2, "")
    assert name == "qa_1" and made.references == ("Ann", "A.") and made.text.count("Document ") == 3
    hotpot = [{"question": f"Q{i}", "answer": "B", "context": [[f"T{i}", ["x. ", "y."]]]} for i in range(5)]
    name, task = load_questions(write(tmp_path / "h.json", json.dumps(hotpot)))
    made = task.build(random.Random(0), 3, "")
    asked = made.text[-1]
    assert name == "qa_2" and f"T{asked}\nx. y." in made.text and made.text.count("Document ") == 4
    for content, expected in (("{", "SQuAD"), ("[]", "at least one"), ('{"data": [{}]}', "KeyError"), ("[1]", "TypeError")):
        with pytest.raises(hz.HybridizeError, match=expected):
            load_questions(write(tmp_path / "bad.json", content))


# -- long generation ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    base = make_base("llama")
    full = hz.convert(base, make_plan(base, "full")).eval()
    near = hz.convert(make_base("llama"), make_plan(base, "window")).eval()
    return full, near


def test_the_base_agrees_with_itself_and_a_window_does_not(models, tokenizer):
    full, near = models
    prompts = drift_prompts(tokenizer, "some words to go on with " * 60, 3, seed=1)["text"]
    assert len({len(p) for p in prompts}) == 1
    path = base_path(full, prompts, 150, seed=1)
    assert path == base_path(full, prompts, 150, seed=1) and len(path[0]) == 150
    choices, nll = path_choices(full, prompts, path, rows=2)
    # the same, decoded token by token
    ids = torch.tensor([[*prompts[0], *path[0]]])
    with torch.no_grad():
        logits = full(ids).logits[0, len(prompts[0]) - 1 : -1]
    assert torch.equal(choices[0], logits.argmax(-1))
    assert torch.allclose(nll[0], -logits.log_softmax(-1)[range(150), path[0]], atol=1e-4)
    own = path_cells("text", choices, nll, choices)
    assert [c.positions for c in own[::2]] == [(0, 128), (128, 150)]
    assert all(c.mean == 1.0 for c in own if c.metric == "agreement")
    other = path_cells("text", *path_choices(near, prompts, path), choices)
    assert all(c.mean < 1.0 for c in other if c.metric == "agreement")


def test_chain_steps(models, tokenizer):
    prompt = chain_prompt(random.Random(3))
    lines = prompt.split("\n")
    assert len(lines) == 14 and lines[-1].endswith(" +")
    total = int(lines[-1].split()[0])
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"]]

    def accuracy(chain):
        return chain_cell(tokenizer, ids, [chain], 9).mean

    right = f" 3 = {total + 3}\n{total + 3} + 4 = {total + 7}\n{total + 7} + 1 = "
    assert accuracy(right) == 1.0
    assert accuracy(f" 3 = {total + 4}\n{total + 4} + 4 = {total + 8}\n") == 0.5  # wrong once, then going on from there
    assert accuracy(f" 3 = {total + 3}\n{total + 9} + 4 = {total + 13}\nnonsense\n") == pytest.approx(1 / 3)
    assert accuracy("no line") == 0.0
    chains = free_chain(models[0], tokenizer, ids, 20)
    assert len(tokenizer(chains[0], add_special_tokens=False)["input_ids"]) <= 20
