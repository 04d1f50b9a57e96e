"""report.html in a real browser: the cells are there, nothing is fetched, nothing is complained about."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridize as hz
from hybridize.evaluation.cells import Cell
from hybridize.report.charts import short
from hybridize.report.page import write_report
from hybridize.workflows import plan_head

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
GEOMETRY = hz.Geometry("llama", layers=6, heads=6, kv_heads=3, head_dim=8, context=4096)


def make_report(path):
    plan = hz.AttentionPlan.from_groups(GEOMETRY, [(1, 0), (1, 1), (1, 2), (4, 1)], hz.Window(16, 2))
    plans = {"full": hz.AttentionPlan.base(GEOMETRY), "drop": plan}
    rows = []
    for name, each in plans.items():
        for context in (512, 1024):
            for depth in (None, 0.25, 0.75):
                cell = Cell("needle", "exact", "share", [True, name == "full", False], context=context, depth=depth)
                rows.append(plan_head(name, each, 2, 1024) | cell.row())
        cell = Cell("perplexity", "perplexity", "nats", [2.25], context=512, positions=(0, 512))
        rows.append(plan_head(name, each, 2, 1024) | cell.row())
    scores = hz.Scores("layer", np.random.default_rng(0).normal(size=(4, 6)), {"scorer": "drop"})
    facts = {"model": "<b>&tiny</b>"}  # must be shown, not obeyed
    return write_report(
        path, title="hybridize: test", plan=plan, rows=rows, scores=scores, facts=facts, seconds={"score": 1.5}
    )


def browse(page, tmp_path, *more):
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", f"--log-net-log={tmp_path / 'net.json'}",
            *more, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


@pytest.mark.parametrize(("unit", "columns"), [("group", 3), ("head", 6)])
def test_scores_by_group_or_head_are_a_grid(tmp_path, unit, columns):
    plan = hz.AttentionPlan.from_groups(GEOMETRY, [(1, 0), (4, 2)], hz.Window(16, 2))
    scores = hz.Scores(unit, np.arange(6 * columns, dtype=float).reshape(1, 6, columns), {"scorer": "echo"})
    page = write_report(tmp_path / "r.html", title="t", plan=plan, rows=[], scores=scores).read_text()
    cells = re.findall(r'<rect class="(cell[ a-z]*)" data-unit="(\d+),(\d+)"[^>]*fill-opacity="([\d.]+)"', page)
    assert len(cells) == 6 * columns and cells[0][3] == "0.04" and cells[-1][3] == "1.00"
    framed = {(int(i), int(j)) for kind, i, j, _ in cells if kind == "cell kept"}
    share = columns // 3
    assert framed == {(i, g * share + n) for i, g in ((1, 0), (4, 2)) for n in range(share)}


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_report_in_a_browser(tmp_path):
    page = make_report(tmp_path / "report.html")
    done = browse(page, tmp_path, "--dump-dom")
    dom = done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr
    events = (tmp_path / "net.json").read_text()
    events = json.loads(events if events.rstrip().endswith("}") else events.rstrip().rstrip(",") + "]}")["events"]
    # every address that any request of this browser named
    urls = {e["params"]["url"] for e in events if isinstance(e.get("params"), dict) and "url" in e["params"]}
    fetched = {url for url in urls if url.startswith(("http", "ws", "ftp")) and "google" not in url}
    assert not fetched, fetched
    for layer in range(6):
        for group in range(3):
            kind = "op-full" if (layer, group) in [(1, 0), (1, 1), (1, 2), (4, 1)] else "op-window"
            assert f'class="{kind}" data-layer="{layer}" data-group="{group}"' in dom
    assert len(re.findall(r'class="bar(?: kept)?" data-unit="\d"', dom)) == 6
    assert 'class="bar kept" data-unit="1"' in dom and 'class="bar" data-unit="4"' in dom
    for name in ("full", "drop"):
        figure = dom.split(f'data-heatmap="{name}"')[1].split("</figure>")[0]
        for context in (512, 1024):
            for depth in (0.25, 0.75):
                share = "67 %" if name == "full" else "33 %"
                assert re.search(rf'data-context="{context}" data-depth="{depth}"[^>]*>{share}<', figure)
        assert f'data-selector="{name}"' in dom
    for chart in ("cache", "prefill", "decode"):
        assert len(re.findall("<polyline", dom.split(f'<div id="{chart}"')[1].split("</div>")[0])) == 2
    assert "&lt;b&gt;&amp;tiny&lt;/b&gt;" in dom


def test_report_names_no_address(tmp_path):
    text = make_report(tmp_path / "report.html").read_text()
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:)[^"')\s>]*//""", text)
    assert "<script" not in text


@given(st.floats(1e-3, 1e17))
def test_short_numbers(value):
    text = short(value)
    assert len(text) <= 9
    number, scale = re.fullmatch(r"([\d.e+-]+)([KMGTP]?)", text).groups()
    assert float(number) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[scale] == pytest.approx(value, rel=0.01)
