"""How large is the report of a large plan, how soon does it open, and how smoothly does it move?"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import pipeplan as pp
from pipeplan.cost import CostModel
from pipeplan.errors import InputError
from pipeplan.report.html import write_report
from pipeplan.report.picture import plot
from pipeplan.report.trace import write_trace
from pipeplan.schedules import SCHEDULES

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = ((8, 32), (64, 256), (64, 800), (26, 30_000), (4096, 16))
NUM_OPENINGS = 5
NUM_FRAMES = 90

# Pans from left to right at one zoom; the time of drawing alone, and from frame to frame.
PAN = """async ([part, frames]) => {
  const {state, draw} = window.pipeplan, whole = state.to;
  const wide = whole * part, drawn = [], between = [];
  let before = null;
  for (let k = 0; k < frames; k++) {
    await new Promise(requestAnimationFrame);
    state.from = (whole - wide) * k / frames;
    state.to = state.from + wide;
    const now = performance.now();
    draw();
    drawn.push(performance.now() - now);
    if (before !== null) between.push(now - before);
    before = now;
  }
  state.from = 0; state.to = whole;
  const sort = (list) => list.sort((a, b) => a - b);
  const at = (list, part) => sort(list)[Math.floor(part * (list.length - 1))];
  return {draw_ms: at(drawn, 0.5), draw_p95_ms: at(drawn, 0.95),
          frame_ms: at(between, 0.5), frame_p95_ms: at(between, 0.95)};
}"""


def make_plan(num_stages: int, num_microbatches: int, seed: int) -> pp.Plan:
    """One stage on each device, uneven layers, 1F1B: the schedule that changes direction most."""
    rng = random.Random(seed)
    model = pp.ModelProfile(
        name="uneven",
        microbatch_size=4,
        layers=tuple(
            pp.LayerProfile(
                name=f"layer{index}",
                forward_ms=rng.uniform(0.8, 1.2),
                backward_ms=rng.uniform(1.6, 2.4),
                output_bytes=1e6,
                parameter_bytes=1e8,
                activation_bytes=5e7,
            )
            for index in range(2 * num_stages)
        ),
    )
    cluster = pp.expand_hosts(
        "hosts of two",
        [pp.HostGroup(count=num_stages // 2, devices=2, bandwidth_gb_per_s=50, memory_gb=80)],
        between_hosts_gb_per_s=12.5,
    )
    stages = tuple(
        pp.Stage(layers=range(2 * n, 2 * n + 2), devices=(n,)) for n in range(num_stages)
    )
    costs = CostModel(model, cluster).pipeline_costs(stages)
    run = SCHEDULES["1f1b"](costs, num_microbatches)
    return pp.Plan(
        model=model,
        cluster=cluster,
        microbatches=num_microbatches,
        stages=stages,
        schedule=pp.Schedule.from_codes(run.order_SM2),
        planner="1f1b",
        seed=seed,
    )


def opening_ms(page: Page, path: Path) -> float:
    """Milliseconds from the request for the page until its first picture is drawn."""
    begin = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    return (time.perf_counter() - begin) * 1e3


def write(kind: str, num_stages: int, num_microbatches: int, path: Path) -> dict[str, float]:
    """Write one file in a new process, to measure its peak memory."""
    plan = make_plan(num_stages, num_microbatches, seed=0)
    begin = time.process_time()  # the machine may have other work
    try:
        {"report": write_report, "plot": plot, "trace": write_trace}[kind](plan, path)
    except InputError as error:
        print(error, file=sys.stderr)
    return {
        f"{kind}_cpu_s": time.process_time() - begin,
        f"{kind}_mb": path.stat().st_size / 1e6 if path.exists() else 0.0,
        f"{kind}_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def write_apart(kind: str, num_stages: int, num_microbatches: int, path: Path) -> dict[str, float]:
    arguments = [kind, str(num_stages), str(num_microbatches), str(path)]
    command = [sys.executable, __file__, "--write", *arguments]
    figures: dict[str, float] = json.loads(subprocess.check_output(command))
    return figures


def measure(page: Page, num_stages: int, num_microbatches: int, folder: Path) -> dict[str, float]:
    path = folder / f"{num_stages}x{num_microbatches}.html"
    figures: dict[str, float] = {
        "stages": num_stages,
        "microbatches": num_microbatches,
        "blocks": 2 * num_stages * num_microbatches,
    }
    for kind, suffix in (("report", ".html"), ("plot", ".svg"), ("trace", ".json")):
        output = path.with_suffix(suffix)
        figures |= write_apart(kind, num_stages, num_microbatches, output)
    openings = sorted(opening_ms(page, path) for _ in range(NUM_OPENINGS))
    figures["open_ms"] = openings[NUM_OPENINGS // 2]
    figures["open_worst_ms"] = openings[-1]
    for name, part in (("whole", 0.98), ("tenth", 0.1), ("hundredth", 0.01)):
        for figure, value in page.evaluate(PAN, [part, NUM_FRAMES]).items():
            figures[f"pan_{name}_{figure}"] = value
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="Print for machines.")
    parser.add_argument(
        "--write", nargs=4, help="Write one file: kind, stages, microbatches, path."
    )
    arguments = parser.parse_args()
    if arguments.write:
        kind, num_stages, num_microbatches, path = arguments.write
        print(json.dumps(write(kind, int(num_stages), int(num_microbatches), Path(path))))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        for num_stages, num_microbatches in SIZES:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            results.append(measure(page, num_stages, num_microbatches, Path(folder)))
            page.close()
        browser.close()
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print(", ".join(f"{name} {value:.4g}" for name, value in result.items()))


if __name__ == "__main__":
    main()
