"""Plans and specs: costs against a count by hand, JSON round trip, and messages that name the field."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridize.errors import HybridizeError
from hybridize.operators.specs import Full, Window, spec_from_dict, spec_to_dict
from hybridize.plan import AttentionPlan, Geometry, units_for_budget

GEOMETRY = Geometry("llama", layers=4, heads=6, kv_heads=3, head_dim=8, context=128, identity="abc")

windows = st.builds(
    Window, st.integers(1, 12), st.integers(0, 5), st.sampled_from(["absolute", "rebased"]), st.just("window")
) | st.builds(Window, st.integers(1, 12), st.integers(0, 5), st.just("absolute"), st.sampled_from(["window", "full"]))
specs = windows | st.just(Full())


def sees(spec, n, j):
    """Whether prompt query n sees key j, as the definition reads."""
    if isinstance(spec, Full):
        return j <= n
    return j <= n and (n - j < spec.size or j < spec.sinks)


@given(specs, st.integers(1, 40))
def test_costs_are_counts(spec, context):
    pairs = sum(sees(spec, n, j) for n in range(context) for j in range(context))
    assert spec.visible_pairs(context) == pairs
    last = context if spec.keeps_everything else sum(sees(spec, context - 1, j) for j in range(context))
    assert spec.visible_keys(context) == last == spec.cached_tokens(context)


@st.composite
def plans(draw):
    names = draw(st.lists(specs, min_size=1, max_size=3))
    operators = {f"op{i}": spec for i, spec in enumerate(names)}
    rows = [[draw(st.sampled_from(sorted(operators))) for _ in range(3)] for _ in range(4)]
    return AttentionPlan(GEOMETRY, operators, rows, {"seed": draw(st.integers(0, 9))})


@given(plans())
@settings(max_examples=50)
def test_json_round_trip(plan):
    again = AttentionPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert all(spec_from_dict(spec_to_dict(spec)) == spec for spec in plan.specs())


@given(plans())
@settings(max_examples=30)
def test_group_order_is_a_permutation_into_spans(plan):
    for layer in range(4):
        order = plan.group_order(layer)
        assert sorted(order) == [0, 1, 2]
        names = [plan.assignment[layer][group] for group in order]
        assert len([1 for a, b in pairwise(names) if a != b]) == len(set(names)) - 1  # each span is contiguous


def test_cache_bytes_and_flops_of_a_known_plan():
    plan = AttentionPlan.from_layers(GEOMETRY, [1], Window(4, 2))
    per_token = 2 * 8 * 2  # key and value, head_dim 8, bf16
    assert plan.cache_bytes(100) == (3 * 100 + 9 * 6) * per_token + 16
    assert plan.cache_bytes(100, batch=3, dtype="float32") == 3 * ((3 * 100 + 9 * 6) * per_token * 2 + 16)
    assert plan.decode_flops(100) == 4 * 8 * 2 * (3 * 100 + 9 * 6)
    full_decode = AttentionPlan.from_layers(GEOMETRY, [1], Window(4, 2, decode="full"))
    assert full_decode.cache_bytes(100) == AttentionPlan.base(GEOMETRY).cache_bytes(100)  # no memory is saved
    assert full_decode.decode_flops(100) == AttentionPlan.base(GEOMETRY).decode_flops(100)
    assert full_decode.prefill_flops(100) == plan.prefill_flops(100)


def test_smollm2_quarter_is_at_most_28_percent_at_8k():
    geometry = Geometry("llama", layers=30, heads=9, kv_heads=3, head_dim=64, context=8192)
    plan = AttentionPlan.from_layers(geometry, range(8), Window(128, 4))
    assert plan.cache_bytes(8192) / AttentionPlan.base(geometry).cache_bytes(8192) <= 0.28


@pytest.mark.parametrize(("units", "budget", "kept"), [(30, 0.25, 8), (30, 0.125, 4), (30, 0.5, 15), (2, 0.25, 1), (5, 1, 5)])
def test_budgets_round_half_up(units, budget, kept):
    assert units_for_budget(units, budget) == kept


@pytest.mark.parametrize("budget", [-0.1, 1.01, float("nan"), "a", True, 0.01, 0])
def test_bad_budgets(budget):
    with pytest.raises(HybridizeError, match="budget"):
        units_for_budget(30, budget)
    assert units_for_budget(30, 0, allow_none=True) == 0


def test_map_shows_every_group():
    plan = AttentionPlan.from_groups(GEOMETRY, [(0, 1), (3, 0), (3, 1), (3, 2)], Window(4, 2))
    assert plan.map().splitlines()[:4] == ["0 wFw", "1 www", "2 www", "3 FFF"]
    assert plan.kept_layers == [3]
    assert plan.kept_groups == [(0, 1), (3, 0), (3, 1), (3, 2)]


def broken(**change):
    data = AttentionPlan.from_layers(GEOMETRY, [1], Window(4, 2)).to_dict()
    for path, value in change.items():
        place, keys = data, path.split("__")
        for key in keys[:-1]:
            place = place[key]
        if value is None:
            del place[keys[-1]]
        else:
            place[keys[-1]] = value
    return data


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": "other"}, "format"),
        ({"format_version": 99}, "format_version"),
        ({"operators__window__size": 0}, "window.size"),
        ({"operators__window__size": 2.5}, "window.size"),
        ({"operators__window__sinks": -1}, "window.sinks"),
        ({"operators__window__decode": "never"}, "window.decode"),
        ({"operators__window__sink_positions": "far"}, "window.sink_positions"),
        ({"operators__window__kind": "cubic"}, "operators.window.kind"),
        ({"operators__window__extra": 1}, "operators.window.extra"),
        ({"geometry__heads": 7}, "geometry.heads"),
        ({"geometry__layers": 5}, "geometry.windows"),
        ({"geometry__head_dim": None}, "head_dim"),
        ({"assignment": [["full"] * 3] * 3}, "plan.assignment"),
        ({"assignment": [["full"] * 2] * 4}, r"plan.assignment\[0\]"),
        ({"assignment": [["nothing"] * 3] * 4}, r"plan.assignment\[0\]\[0\]"),
        ({"assignment": "full"}, "plan.assignment"),
        ({"provenance": None}, "plan fields"),
    ],
)
def test_bad_plans_name_the_field(change, field):
    with pytest.raises(HybridizeError, match=field):
        AttentionPlan.from_dict(broken(**change))


def test_rebased_sinks_need_windowed_decode():
    with pytest.raises(HybridizeError, match="sink_positions"):
        Window(4, 2, sink_positions="rebased", decode="full")


def test_base_windows_are_respected():
    sliding = Geometry("mistral", layers=2, heads=2, kv_heads=1, head_dim=8, context=128, windows=(16, None))
    base = AttentionPlan.base(sliding)
    assert [base.spec(layer, 0) for layer in range(2)] == [Window(16, 0), Full()]
    AttentionPlan.from_layers(sliding, [1], Window(8, 2))
    for spec in (Full(), Window(17, 0), Window(8, 0, decode="full")):
        with pytest.raises(HybridizeError, match=r"plan.assignment\[0\]\[0\].*base's own window"):
            AttentionPlan(sliding, {"a": spec, "full": Full()}, [["a"], ["full"]])


def test_context_limit():
    absolute = AttentionPlan.from_layers(GEOMETRY, [], Window(8, 2))
    rebased = AttentionPlan.from_layers(GEOMETRY, [], Window(8, 2, sink_positions="rebased"))
    for plan in (absolute, AttentionPlan.base(GEOMETRY), AttentionPlan.from_layers(GEOMETRY, [0], Window(8, 0))):
        plan.check_context(128)
        with pytest.raises(HybridizeError, match="trained context"):
            plan.check_context(129)
    rebased.check_context(10**6)
    AttentionPlan.from_layers(GEOMETRY, [], Window(8, 0)).check_context(10**6)


def test_corrupted_file(tmp_path):
    path = AttentionPlan.base(GEOMETRY).save(tmp_path / "plan.json")
    assert AttentionPlan.load(path) == AttentionPlan.base(GEOMETRY)
    path.write_text(path.read_text()[:100])
    with pytest.raises(HybridizeError, match="corrupted or truncated"):
        AttentionPlan.load(path)
    with pytest.raises(HybridizeError, match="existing file"):
        AttentionPlan.load(tmp_path / "none.json")


def test_plan_modules_import_no_torch():
    import subprocess
    import sys

    from hybridize import plan

    root = plan.__file__.rsplit("/hybridize/", 1)[0]
    code = (
        "import sys, types; package = types.ModuleType('hybridize'); "
        f"package.__path__ = [{root + '/hybridize'!r}]; sys.modules['hybridize'] = package; "
        "import hybridize.plan, hybridize.scores; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
