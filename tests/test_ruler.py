"""RULER's definitions on small cases: needle counts, depths, chains, frequencies, sizes, answer rules."""

import dataclasses
import random
import re
import types
from collections import Counter

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_plan
from hybridize.data import ruler
from hybridize.data.questions import Question, questions
from hybridize.data.ruler import ruler_prompts
from hybridize.data.ruler_tasks import NOISE, TASKS, Task
from hybridize.data.text import bundled_text
from hybridize.evaluation.ruler import forced_cells, ruler_answers, ruler_cells, ruler_score

TEXT = bundled_text("evaluation")


def example(task, size=80, seed=0):
    return TASKS[task].build(random.Random(seed), size, TEXT)


NEEDLE = r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\."
COUNTS = {  # needles in the text, references
    "niah_single_1": (1, 1), "niah_single_2": (1, 1), "niah_single_3": (1, 1), "niah_multikey_1": (4, 1),
    "niah_multivalue": (4, 4), "niah_multiquery": (4, 4), "niah_multikey_2": (81, 1), "niah_multikey_3": (81, 1),
}  # fmt: skip


@pytest.mark.parametrize("task", COUNTS)
@pytest.mark.parametrize("seed", range(5))
def test_needles(task, seed):
    made = example(task, seed=seed)
    needles = re.findall(NEEDLE, made.text)
    assert (len(needles), len(made.references)) == COUNTS[task]
    uuids = task in ("niah_single_3", "niah_multikey_3")
    shape = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}" if uuids else r"[1-9]\d{6}"
    assert all(re.fullmatch(shape, value) for _, _, value in needles)
    asked = made.text.rsplit("special magic", 1)[1]
    keys = {key for _, key, value in needles if value in made.references}
    assert all(key in asked for key in keys)
    assert {value for _, key, value in needles if key in keys} == set(made.references)  # every value of each asked key
    assert len(keys) == {"niah_multiquery": 4}.get(task, 1)
    one = len(made.references) == 1
    assert ("What is the special" in made.text) == one == made.prefix.endswith(" is")
    assert made.prefix.startswith(" The special magic")


def test_haystacks():
    noise = example("niah_single_1").text.split("\n")
    assert noise.count(NOISE) == 80 and len(noise) == 80 + 3  # the first line, the needle, the question
    assert "One of the special" not in re.sub(NEEDLE, "", example("niah_single_2").text)
    words = re.sub(NEEDLE, "", example("niah_single_2", 500).text.split("\n")[1]).split()
    assert words == TEXT.split()[:500]


def test_depths_cover_the_text():
    places = []
    for seed in range(400):
        context = example("niah_single_2", 2000, seed).text.split("\n")[1]
        places.append(context.index("One of the special") / len(context))
    counts = Counter(int(5 * place) for place in places)
    assert all(counts[i] > 35 for i in range(5))  # places snap to sentences, one of them long


def test_variable_tracking():
    made = example("vt", 30)
    shown, asked = made.text.split("\n\n", 2)[1], made.text.rsplit("\n\n", 1)[1]
    assert len(made.references) == 5 and all(re.fullmatch("[A-Z]{5}", name) for name in made.references)
    value = re.search(r"assigned the value (\d{5}) in the text above", asked)[1]
    lines = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", asked)
    assert lines == list(zip(made.references, [value, *made.references]))  # in order
    assert asked.count(NOISE) == 30
    assert len(re.findall(r"VAR [A-Z]{3} = ", shown)) == 5
    assert f"5 variables are assigned the value {value}" in made.prefix


@pytest.mark.parametrize(
    ("length", "often", "seldom", "example"), [(4096, 30, 3, [3] * 30 + [10] * 10), (4095, 6, 1, [1] * 10 + [3] * 10)]
)
def test_common_words(length, often, seldom, example):
    made = TASKS["cwe"].build_for(length)(random.Random(0), 100, TEXT)
    listed = made.text.rsplit("\n\n", 1)[1].split("\n")[1]
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert len(made.references) == 10 and len(counts) == 110
    assert {counts[word] for word in made.references} == {often}
    assert {n for word, n in counts.items() if word not in made.references} == {seldom}
    shown = Counter(re.findall(r"\d+\. (\w+)", made.text.split("\n")[1]))
    assert sorted(shown.values()) == example


def test_frequent_words():
    made = example("fwe", 3000)
    counts = Counter(made.text.split("coded words. ")[1].split("\nQuestion")[0].split())
    ranked = [word for word, _ in counts.most_common(5)]
    assert ranked[0] == "..." and tuple(ranked[1:4]) == made.references
    assert all(re.fullmatch("[a-z]{6}", word) for word in made.references)
    assert counts["..."] == int(3000 / 1.6449340668482264) and counts[ranked[1]] == int(3000 / 4 / 1.6449340668482264)


def test_questions():
    items = [Question("Who?", ("gold one", "gold two"), ("Ann", "Anna"))]
    made = questions(items, ["gold one", *(f"filler {i}" for i in range(20))]).build(random.Random(0), 5, "")
    documents = re.findall(r"Document \d+:\n(.*)", made.text)
    assert len(documents) == 7 and {"gold one", "gold two"} <= set(documents)
    assert made.references == ("Ann", "Anna") and made.text.endswith("Question: Who?")
    with pytest.raises(hz.HybridizeError, match="documents"):
        questions(items, ["a"]).build(random.Random(0), 5, "")


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_the_length(tokenizer, task):
    length = 9000
    prompts = list(ruler_prompts(tokenizer, task, TEXT, length=length, count=2, seed=1))
    for prompt in prompts:
        used = len(prompt.ids) + prompt.new_tokens
        assert used <= length
        assert used > 0.9 * length  # one more unit of filler would not fit
        assert tokenizer.decode(prompt.ids).count("Question") or "mentioned in the provided text" in tokenizer.decode(
            prompt.ids
        )
    again = list(ruler_prompts(tokenizer, task, TEXT, length=length, count=1, seed=1))
    assert again[0] == prompts[0]  # an example does not depend on how many are made
    other = list(ruler_prompts(tokenizer, task, TEXT, length=length, count=1, seed=2))
    assert other[0] != prompts[0]


def test_prompts_stream(tokenizer, monkeypatch):
    built = []
    task = TASKS["niah_single_1"]
    spy = Task(lambda *args: built.append(1) or task.build(*args), task.new_tokens)
    stream = ruler_prompts(tokenizer, spy, TEXT, length=2000, count=10**6, name="spy")
    next(stream)
    assert len(built) < 50


def test_bad_requests(tokenizer):
    with pytest.raises(hz.HybridizeError, match="task"):
        next(ruler_prompts(tokenizer, "niah", TEXT, length=4000, count=1))
    with pytest.raises(hz.HybridizeError, match="length"):
        next(ruler_prompts(tokenizer, "vt", TEXT, length=200, count=1))


def test_scores():
    assert ruler_score("the values are 123 and ABC", ["123", "abc", "x", "y"], "all") == 0.5
    assert ruler_score("It was anna.", ["Ann", "Bob"], "part") == 1.0
    assert ruler_score("nobody", ["Ann", "Bob"], "part") == 0.0
    with pytest.raises(hz.HybridizeError, match="metric"):
        ruler_score("", ["a"], "some")


@pytest.mark.parametrize("operator", ["full", "mixed"])
def test_left_padded_batches_answer_as_single_prompts(tokenizer, operator):
    base = make_base("mistral", max_position_embeddings=8192)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "v_proj" in name or "o_proj" in name:
                parameter.mul_(3)  # or the last token alone decides, and every answer is the same
    model = hz.convert(base, make_plan(base, operator)).eval()
    prompts = []
    for i, task in enumerate(("niah_single_1", "niah_single_2", "niah_multikey_2", "niah_single_3") * 4):
        made = next(ruler_prompts(tokenizer, task, TEXT, length=1400 + 40 * i, count=1, seed=i))
        prompts.append(ruler.RulerPrompt(made.task, made.length, made.ids, 8, made.references, made.metric))
    numbers = types.SimpleNamespace(pad_token_id=0, batch_decode=lambda rows, **_: [" ".join(map(str, row)) for row in rows])
    together = ruler_answers(model, numbers, prompts, batch_tokens=10**6)
    assert [prompt for prompt, _ in together] == prompts
    alone = [ruler_answers(model, numbers, [prompt])[0] for prompt in prompts]
    assert together == alone
    assert len({answer for _, answer in together}) > 4  # the answers differ, so equality says something
    rows = [cell.row() for cell in ruler_cells(together)]
    assert len(rows) == 16 and all(row["n"] == 1 for row in rows)


def test_forced_answers_are_what_greedy_decoding_begins_with(tokenizer):
    """An answer swapped for what the model writes is right; another is not."""
    base = make_base("llama", max_position_embeddings=8192)
    model = hz.convert(base, make_plan(base, "full")).eval()
    tasks = ("niah_single_1", "niah_multikey_1")
    prompts = [next(ruler_prompts(tokenizer, task, TEXT, length=1400, count=1)) for task in tasks]
    for prompt in prompts:
        assert tokenizer.decode(prompt.answer).strip() == prompt.references[0]
        assert prompt.forced().ids[: len(prompt.ids)] == prompt.ids
    written = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
        written.append(dataclasses.replace(prompt, answer=tuple(out[0, ids.shape[1] :].tolist())))
    cells = forced_cells(model, [written[0], prompts[1]])
    assert [(cell.row()["score"], cell.row()["context"]) for cell in cells] == [(1.0, 1400), (0.0, 1400)]
    with pytest.raises(hz.HybridizeError, match="no one right answer"):
        next(ruler_prompts(tokenizer, "vt", TEXT, length=2000, count=1)).forced()


def test_rows(tokenizer):
    prompt = ruler.RulerPrompt("vt", 100, (1,), 3, ("A", "B"), "all")
    (cell,) = ruler_cells([(prompt, "A B"), (prompt, "A"), (prompt, "B"), (prompt, "")])
    row = cell.row()
    assert (row["score"], row["n"]) == (0.5, 4)
    assert row["low"] < 0.5 < row["high"]
    assert torch.tensor(row["high"] - row["low"]) == pytest.approx(2 * 1.96 * 0.408 / 2, rel=1e-2)
