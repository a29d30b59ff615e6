"""The tables and the plot of this benchmark, from results.csv."""

import csv
import math
import statistics
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
CLEARLY = 0.05
"""Planners whose predictions differ by less count as equal."""
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#2e4057")
SIZE, MARGIN = 460, 50

Row = dict[str, str]


def read() -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = defaultdict(list)
    with (FOLDER / "results.csv").open() as file:
        for row in csv.DictReader(file):
            rows[row["part"]].append(row)
    return rows


def accuracy_table(rows: list[Row]) -> None:
    print("| model | cluster | planner | devices | stages | predicted ms | measured ms | error |")
    print("|---|---|---|--:|---|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['model']} | {row['cluster']} | {row['planner']} | {row['devices']}"
            f" | {row['stages']} | {float(row['predicted_ms']):.1f}"
            f" | {float(row['measured_ms']):.1f} | {100 * float(row['error']):+.2f} % |"
        )
    errors = [abs(float(row["error"])) for row in rows]
    seconds = sum(float(row["seconds"]) for row in rows)
    print(
        f"\n{len(rows)} plans in {seconds:.0f} s: median |error|"
        f" {100 * statistics.median(errors):.2f} %, worst {100 * max(errors):.2f} %."
    )


def planner_table(rows: list[Row]) -> None:
    groups: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        groups[row["cluster"], row["model"]][row["planner"]] = row
    planners = list(dict.fromkeys(row["planner"] for row in rows))
    print(f"| cluster | model | {' | '.join(planners)} |")
    print(f"|---|---|{'--:|' * len(planners)}")
    speedups: dict[str, list[float]] = defaultdict(list)
    pairs = wrong = 0
    for (cluster, model), found in groups.items():
        cells = []
        for planner in planners:
            row = found.get(planner)
            cells.append(
                f"{float(row['measured_ms']):.0f} ({float(row['predicted_ms']):.0f})" if row else ""
            )
            if row and "best" in found:
                ratio = float(row["measured_ms"]) / float(found["best"]["measured_ms"])
                speedups[planner].append(ratio)
        print(f"| {cluster} | {model} | {' | '.join(cells)} |")
        for one, two in combinations(found.values(), 2):
            predicted = float(one["predicted_ms"]) / float(two["predicted_ms"])
            measured = float(one["measured_ms"]) / float(two["measured_ms"])
            if abs(math.log(predicted)) > math.log(1 + CLEARLY):
                pairs += 1
                wrong += (predicted > 1) != (measured > 1)
    print(f"\nRanking: {pairs - wrong} of {pairs} clearly different pairs agree.")
    for planner, ratios in speedups.items():
        if planner != "best":
            mean = statistics.geometric_mean(ratios)
            print(
                f"best over {planner}: {mean:.2f}x measured in geometric mean,"
                f" {min(ratios):.2f}x to {max(ratios):.2f}x"
            )


def shared_table(rows: list[Row]) -> None:
    print("| cluster | model | planner | predicted ms | measured ms | error | error if blind |")
    print("|---|---|---|--:|--:|--:|--:|")
    for row in rows:
        measured, blind = float(row["measured_ms"]), float(row["blind_ms"])
        if measured / blind > 1.2:
            print(
                f"| {row['cluster']} | {row['model']} | {row['planner']}"
                f" | {float(row['predicted_ms']):.1f} | {measured:.1f}"
                f" | {100 * float(row['error']):+.2f} % | {100 * (measured / blind - 1):+.0f} % |"
            )


def plot(rows: list[Row]) -> str:
    """Measured over predicted times, both on logarithmic scales, with the line of no error."""
    times = [float(row[name]) for row in rows for name in ("predicted_ms", "measured_ms")]
    low, high = math.log(min(times) / 1.15), math.log(max(times) * 1.15)

    def at(ms: float) -> float:
        return MARGIN + (SIZE - 2 * MARGIN) * (math.log(ms) - low) / (high - low)

    planners = list(dict.fromkeys(row["planner"] for row in rows))
    parts = [
        f'<line x1="{MARGIN}" y1="{SIZE - MARGIN}" x2="{SIZE - MARGIN}" y2="{MARGIN}"'
        ' stroke="#999" stroke-dasharray="4 3"/>'
    ]
    for ms in (100, 200, 500, 1000, 2000, 5000):
        if low <= math.log(ms) <= high:
            parts.append(_text(at(ms), SIZE - MARGIN + 16, f"{ms} ms", "middle"))
            parts.append(_text(MARGIN - 4, SIZE - at(ms) + 4, str(ms), "end"))
    for row in rows:
        colour = COLOURS[planners.index(row["planner"]) % len(COLOURS)]
        parts.append(
            f'<circle cx="{at(float(row["predicted_ms"])):.1f}"'
            f' cy="{SIZE - at(float(row["measured_ms"])):.1f}" r="4" fill="{colour}"'
            ' fill-opacity="0.75"/>'
        )
    for index, planner in enumerate(planners):
        colour, y = COLOURS[index % len(COLOURS)], MARGIN + 16 * index
        parts.append(f'<circle cx="{MARGIN + 14}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(_text(MARGIN + 24, y + 4, planner, "start"))
    parts.append(_text(SIZE / 2, SIZE - 10, "predicted", "middle"))
    parts.append(_text(14, 20, "measured (ms)", "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}"'
        f' height="{SIZE}" font-family="sans-serif" font-size="11">'
        f'<rect width="{SIZE}" height="{SIZE}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    rows = read()
    accuracy_table(rows["accuracy"])
    print()
    accuracy_table(rows["families"])
    print()
    planner_table(rows["planners"])
    print()
    shared_table([*rows["shared"], *rows["planners"]])
    (FOLDER / "planners.svg").write_text(plot(rows["planners"]))


if __name__ == "__main__":
    main()
