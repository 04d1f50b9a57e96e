"""Small inline SVG charts: no script, no font, no network; every mark is an element that a test can find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 56, 36, 12


def _frame(body: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" class="chart">{body}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def short(value: float) -> str:
    """A number in few characters."""
    for limit, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _axis(low: float, high: float, y: Any) -> str:
    marks = [low + (high - low) * i / 4 for i in range(5)]
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(m):.1f}" y2="{y(m):.1f}"/>'
        + _text(LEFT - 6, y(m) + 4, short(m), "end")
        for m in marks
    )


def bars(values: Sequence[float], errors: Sequence[float], chosen: Sequence[int], label: str) -> str:
    """One bar a unit with its standard error; chosen units stand out."""
    high = max([v + e for v, e in zip(values, errors, strict=True)] + [0.0])
    low = min([v - e for v, e in zip(values, errors, strict=True)] + [0.0])
    high = high if high > low else low + 1.0  # nothing but zeros

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    step = (WIDTH - LEFT - 8) / len(values)
    parts = [_axis(low, high, y)]
    every = max(1, len(values) // 15)
    for i, (value, error) in enumerate(zip(values, errors, strict=True)):
        x, top, bottom = LEFT + i * step, min(y(value), y(0)), max(y(value), y(0))
        kind = "bar kept" if i in chosen else "bar"
        parts.append(
            f'<rect class="{kind}" data-unit="{i}" x="{x + step * 0.15:.1f}" y="{top:.1f}" width="{step * 0.7:.1f}" '
            f'height="{max(bottom - top, 0.5):.1f}"><title>{i}: {value:.4f} ± {error:.4f}</title></rect>'
            f'<line class="error" x1="{x + step / 2:.1f}" x2="{x + step / 2:.1f}" y1="{y(value - error):.1f}" '
            f'y2="{y(value + error):.1f}"/>'
        )
        if i % every == 0:
            parts.append(_text(x + step / 2, HEIGHT - BOTTOM + 16, str(i)))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, "layer"))
    return _frame("".join(parts), label)


def grid(values: Sequence[Sequence[float]], chosen: Sequence[Sequence[bool]], rows: str, label: str) -> str:
    """A cell for each unit of each layer, layers from left to right; the darker the higher, chosen ones framed.

    Args:
        values, chosen: [layers][units]. rows: what a row is, "group" or "head".
    """
    low, high = min(map(min, values)), max(map(max, values))
    wide, tall = (WIDTH - LEFT - 8) / len(values), (HEIGHT - TOP - BOTTOM) / len(values[0])
    parts = []
    for i, layer in enumerate(values):
        for j, value in enumerate(layer):
            share = (value - low) / (high - low) if high > low else 0.0
            kind = "cell kept" if chosen[i][j] else "cell"
            parts.append(
                f'<rect class="{kind}" data-unit="{i},{j}" x="{LEFT + i * wide + 1:.1f}" y="{TOP + j * tall + 1:.1f}" '
                f'width="{wide - 2:.1f}" height="{max(tall - 2, 1):.1f}" fill-opacity="{0.04 + 0.96 * share:.2f}">'
                f"<title>layer {i}, {rows} {j}: {value:.4f}</title></rect>"
            )
        if i % max(1, len(values) // 15) == 0:
            parts.append(_text(LEFT + (i + 0.5) * wide, HEIGHT - BOTTOM + 16, str(i)))
    for j in range(0, len(values[0]), max(1, len(values[0]) // 8)):
        parts.append(_text(LEFT - 6, TOP + (j + 0.5) * tall + 4, str(j), "end"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, f"layer ({rows}s from top to bottom)"))
    return _frame("".join(parts), label)


def lines(x_values: Sequence[int], series: Mapping[str, Sequence[float]], label: str) -> str:
    """Lines over contexts that double from 1K on, with a legend."""
    high = max(max(values) for values in series.values()) or 1.0

    def y(value: float) -> float:
        return TOP + (high - value) / high * (HEIGHT - TOP - BOTTOM)

    def x(i: int) -> float:
        return LEFT + 16 + i * (WIDTH - LEFT - 40) / max(1, len(x_values) - 1)

    parts = [_axis(0.0, high, y)]
    parts += [_text(x(i), HEIGHT - BOTTOM + 16, f"{value // 1024}K") for i, value in enumerate(x_values)]
    for n, (name, values) in enumerate(series.items()):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline class="line line-{n}" data-series="{escape(name)}" points="{points}"/>')
        parts += [
            f'<circle class="dot line-{n}" cx="{x(i):.1f}" cy="{y(v):.1f}" r="3">'
            f"<title>{escape(name)}: {short(v)}</title></circle>"
            for i, v in enumerate(values)
        ]
        parts.append(f'<rect class="key line-{n}" x="{LEFT + 12}" y="{TOP + 4 + 18 * n}" width="12" height="12"/>')
        parts.append(_text(LEFT + 30, TOP + 14 + 18 * n, name, "start"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, "context, tokens"))
    return _frame("".join(parts), label)


def _steps(count: int) -> tuple[Callable[[int], float], str]:
    """Where step i of `count` lies, and the axis below."""

    def x(i: int) -> float:
        return LEFT + 16 + i * (WIDTH - LEFT - 40) / max(1, count - 1)

    marks = [_text(x(i), HEIGHT - BOTTOM + 16, str(i + 1)) for i in sorted({(count - 1) * n // 4 for n in range(5)})]
    return x, "".join(marks) + _text((LEFT + WIDTH) / 2, HEIGHT - 4, "step")


def curve(series: Mapping[str, Sequence[float]], label: str) -> str:
    """A value at every step, a line each, steps from left to right."""
    high = max(max(values) for values in series.values()) or 1.0
    steps = max(len(values) for values in series.values())

    def y(value: float) -> float:
        return TOP + (high - value) / high * (HEIGHT - TOP - BOTTOM)

    x, marks = _steps(steps)
    parts = [_axis(0.0, high, y), marks]
    for n, (name, values) in enumerate(series.items()):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline class="line line-{n}" data-series="{escape(name)}" points="{points}"/>')
        parts.append(f'<rect class="key line-{n}" x="{WIDTH - 150}" y="{TOP + 4 + 18 * n}" width="12" height="12"/>')
        parts.append(_text(WIDTH - 132, TOP + 14 + 18 * n, name, "start"))
    return _frame("".join(parts), label)


def paths(series: Sequence[tuple[str, Sequence[float], bool]], label: str) -> str:
    """Many values between 0 and 1 at every step, a thin line each; (name, values, chosen), the chosen ones stand out."""
    steps = max(len(values) for _, values, _ in series)

    def y(value: float) -> float:
        return TOP + (1 - value) * (HEIGHT - TOP - BOTTOM)

    x, marks = _steps(steps)
    parts = [_axis(0.0, 1.0, y), marks]
    for name, values, chosen in sorted(series, key=lambda each: each[2]):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(
            f'<polyline class="path{" chosen" if chosen else ""}" data-series="{escape(name)}" points="{points}">'
            f"<title>{escape(name)}: {values[-1]:.3f}</title></polyline>"
        )
    return _frame("".join(parts), label)


def scatter(points: Sequence[Mapping[str, Any]], x_label: str, y_label: str) -> str:
    """Quality over cost: a dot with its interval a point, its name beside it, and the line of those that none beats.

    Args:
        points: {"name", "x" (share of the base, 0..), "y", "low", "high", "color" (0..9)}; y between 0 and 1.
    """
    right = max([point["x"] for point in points] + [1.0])
    highest = max(point["high"] for point in points)
    top = next((step for step in (0.1, 0.2, 0.4, 0.6, 0.8) if highest < step), 1.0)

    def x(value: float) -> float:
        return LEFT + 10 + value / right * (WIDTH - LEFT - 110)

    def y(value: float) -> float:
        return TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM)

    parts = [_axis(0.0, top, y)]
    parts += [_text(x(right * i / 4), HEIGHT - BOTTOM + 16, f"{100 * right * i / 4:.0f} %") for i in range(5)]
    best, edge = -1.0, []
    for point in sorted(points, key=lambda p: (p["x"], -p["y"])):
        if point["y"] > best:
            best = point["y"]
            edge.append(f"{x(point['x']):.1f},{y(best):.1f}")
    parts.append(f'<polyline class="frontier" points="{" ".join(edge)}"/>')
    labels = _spread([(x(point["x"]), y(point["y"]) + 4) for point in points])
    for point, label in zip(points, labels, strict=True):
        px, py, high, low = x(point["x"]), y(point["y"]), y(min(point["high"], top)), y(point["low"])
        title = f"{point['name']}: {point['y']:.3f} ({point['low']:.3f}–{point['high']:.3f}) at {100 * point['x']:.1f} %"
        parts.append(
            f'<line class="error" x1="{px:.1f}" x2="{px:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            f'<circle class="c{point["color"]}" data-point="{escape(point["name"])}" cx="{px:.1f}" cy="{py:.1f}" r="5">'
            f"<title>{escape(title)}</title></circle>"
            f'<text class="c{point["color"]} dot-label" x="{px + 9:.1f}" y="{label:.1f}">{escape(point["name"])}</text>'
        )
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, x_label))
    return _frame("".join(parts), f"{y_label} over {x_label}")


def _spread(places: Sequence[tuple[float, float]], gap: float = 13.0, reach: float = 110.0) -> list[float]:
    """Heights for labels at (x, y): neighbours within `reach` stand at least `gap` apart, in order, inside the frame."""
    heights = [0.0] * len(places)
    done: list[int] = []
    for i in sorted(range(len(places)), key=lambda i: places[i][1]):
        near = [heights[j] for j in done if abs(places[i][0] - places[j][0]) < reach]
        heights[i] = max([places[i][1], *(height + gap for height in near)])
        done.append(i)
    floor = HEIGHT - BOTTOM + 2
    for i in reversed(done):
        near = [heights[j] for j in done if places[j][1] > places[i][1] and abs(places[i][0] - places[j][0]) < reach]
        heights[i] = min([heights[i], floor, *(height - gap for height in near if height >= heights[i])])
    return heights
