"""The report in a real browser: it opens, moves, tells, follows, downloads, and runs no name."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hostile_names import NAMES
from hostile_names import hostile_plan as plan_named
from instances import even_plan
from pipeplan.documents.files import plan_document, read_plan
from pipeplan.report import picture
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.html import write_report
from pipeplan.report.page_beside import SideBySide
from pipeplan.report.timeline_picture import timeline_svg
from pipeplan.report.trace import trace_document

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
pytestmark = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason="chromium is not installed: apt-get install chromium"
)
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)
SCREENSHOTS = Path("build/screenshots")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def bert_plan():
    from pipeplan import zoo
    from pipeplan.planning.door import plan

    return plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), microbatches=16, planner="spp")


@pytest.fixture(scope="module")
def large_plan():
    return even_plan(20, 2)


@pytest.fixture
def open_report(browser, tmp_path):
    """Opens a plan's report; at the end nothing may have complained or asked for the network."""
    complaints: list[str] = []
    contexts = []

    def open_it(plan, comparison=None, beside=None, **options):
        path = tmp_path / "plan.html"
        write_report(plan, path, comparison, beside=beside)
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url in (path.as_uri(),) or request.url.startswith("blob:")
                else complaints.append(f"request: {request.url}")
            ),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []


def point_of(page, letter: str, stage: int, microbatch: int) -> tuple[float, float]:
    point = page.evaluate(
        "([letter, n, m]) => pipeplan.pointOf(pipeplan.numberOfBlock(letter, n, m))",
        [letter, stage, microbatch],
    )
    return point["x"], point["y"]


def span_ms(page) -> float:
    return page.evaluate("pipeplan.state.to - pipeplan.state.from")


def test_a_block_tells_its_times_and_what_it_waited_for(open_report, drawn_plan):
    page = open_report(drawn_plan)
    page.mouse.move(*point_of(page, "B", 0, 1))
    assert page.locator("#tip").inner_text().split("\n") == [
        "B1 on stage 0",
        "9.000 ms to 11.00 ms, takes 2.000 ms",
        "microbatch 1 backward, d0, d2",
        "waited for transfer of B1 from stage 1 to 0",
    ]
    page.mouse.move(*point_of(page, "F", 1, 1))
    assert "waited for B0 on stage 1 (its devices were busy)" in page.locator("#tip").inner_text()


def test_idle_time_tells_what_it_waits_for(open_report, drawn_plan):
    page = open_report(drawn_plan)
    x, y = point_of(page, "F", 1, 0)
    before = point_of(page, "F", 0, 1)[0]
    page.mouse.move(before, y)
    assert page.locator("#tip").inner_text().split("\n") == [
        "stage 1 idle",
        "0.000 ms to 2.000 ms, 2.000 ms",
        "F0 waits for transfer of F0 from stage 0 to 1",
    ]
    assert x > before


def test_wheel_drag_and_double_click(open_report, drawn_plan):
    page = open_report(drawn_plan)
    assert span_ms(page) == 14
    x, y = point_of(page, "B", 0, 0)
    page.mouse.move(x, y)
    zoom_by_wheel(page, whole_ms=14, key="Control")
    # What was under the pointer still is.
    assert point_of(page, "B", 0, 0)[0] == pytest.approx(x, abs=1)
    before = page.evaluate("pipeplan.state.from")
    page.mouse.down()
    page.mouse.move(x + 60, y, steps=4)
    page.mouse.up()
    assert page.evaluate("pipeplan.state.from") < before
    assert point_of(page, "B", 0, 0)[0] == pytest.approx(x + 60, abs=2)
    page.mouse.dblclick(x, y)
    assert span_ms(page) == 14


def zoom_by_wheel(page, whole_ms: float, key: str | None = None) -> None:
    """Turn the wheel where the pointer is, and wait until the timeline shows less than all."""
    if key:
        page.keyboard.down(key)
    page.mouse.wheel(0, -400)
    if key:
        page.keyboard.up(key)
    for _ in range(100):
        if span_ms(page) < 0.95 * whole_ms:
            return
        page.wait_for_timeout(20)
    pytest.fail("the wheel does not zoom")


def test_the_wheel_scrolls_the_page_until_a_click(open_report, drawn_plan):
    page = open_report(drawn_plan, viewport={"width": 1280, "height": 500})
    page.locator("#timeline").scroll_into_view_if_needed()
    x, y = point_of(page, "B", 0, 0)
    page.mouse.move(x, y)
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 60)
    page.wait_for_timeout(300)
    assert page.evaluate("scrollY") > before
    assert span_ms(page) == 14
    page.mouse.move(*point_of(page, "B", 0, 0))
    page.mouse.click(*point_of(page, "B", 0, 0))
    zoom_by_wheel(page, whole_ms=14)
    # Once the pointer has left, the wheel scrolls again.
    page.mouse.move(5, 5)
    shown = span_ms(page)
    page.mouse.move(*point_of(page, "B", 0, 0))
    page.mouse.wheel(0, -60)
    page.wait_for_timeout(200)
    assert span_ms(page) == shown


def test_keys_zoom_pan_and_go_from_block_to_block(open_report, drawn_plan):
    page = open_report(drawn_plan)
    page.locator("#timeline").focus()
    page.keyboard.press("+")
    assert span_ms(page) == pytest.approx(9.8)
    before = page.evaluate("pipeplan.state.from")
    page.keyboard.press("d")
    assert page.evaluate("pipeplan.state.from") > before
    page.keyboard.press("0")
    assert span_ms(page) == 14
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip b").inner_text() == "F0 on stage 0"
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator("#tip b").inner_text() == "B1 on stage 0"
    assert "9.000 ms to 11.00 ms" in page.locator("#said").inner_text()
    page.keyboard.press("b")
    assert page.locator("#tip b").inner_text() == "transfer of B1 from stage 1 to 0"
    page.keyboard.press("b")
    assert page.locator("#tip b").inner_text() == "B1 on stage 1"
    page.keyboard.press("Enter")
    assert page.locator("#microbatch").input_value() == "1"
    page.keyboard.press("c")
    assert page.locator("#critical").is_checked()
    page.keyboard.press("Escape")
    assert page.locator("#microbatch").input_value() == ""
    assert not page.locator("#tip").is_visible()


# A copy of the timeline to read from: reading the canvas itself would make the browser complain.
COPY = """pipeplan.draw();
  const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const pixels = copy.getContext("2d", {willReadFrequently: true});
  pixels.drawImage(canvas, 0, 0);"""


def colour_at(page, x: float, y: float) -> list[int]:
    """The canvas's own pixel under a point of the page."""
    return page.evaluate(
        f"""([x, y]) => {{ {COPY}
          const ratio = canvas.width / box.width;
          return [...pixels.getImageData(
            (x - box.left) * ratio, (y - box.top) * ratio, 1, 1).data]; }}""",
        [x, y],
    )


def test_a_microbatch_stands_out(open_report, drawn_plan):
    page = open_report(drawn_plan)
    middles = {m: point_of(page, "B", 0, m) for m in (0, 1)}
    points = {m: (x - 20, y - 6) for m, (x, y) in middles.items()}  # beside the label
    plain = {m: colour_at(page, *point) for m, point in points.items()}
    assert plain[0] == plain[1]
    page.locator("#microbatch").fill("1")
    assert colour_at(page, *points[1]) == plain[1]
    assert colour_at(page, *points[0]) != plain[0]
    page.locator("#microbatch").fill("")
    assert colour_at(page, *points[0]) == plain[0]
    page.mouse.click(*point_of(page, "F", 1, 0))
    assert page.locator("#microbatch").input_value() == "0"


def test_the_critical_path_is_drawn(open_report, drawn_plan):
    page = open_report(drawn_plan)
    count = f"""() => {{ {COPY}
      const d = pixels.getImageData(0, 0, canvas.width, canvas.height).data;
      let found = 0;
      for (let i = 0; i < d.length; i += 4)
        if (d[i] === 194 && d[i + 1] === 37 && d[i + 2] === 92) found++;
      return found; }}"""
    assert page.evaluate(count) == 0
    page.locator("#critical").check()
    assert page.evaluate(count) > 500


def test_downloads(open_report, bert_plan, tmp_path):
    page = open_report(bert_plan)
    with page.expect_download() as download:
        page.locator("#download-plan").click()
    assert download.value.suggested_filename == "bert-large-4x2-10g.plan.json"
    download.value.save_as(tmp_path / "saved.plan.json")
    saved = read_plan(tmp_path / "saved.plan.json")
    assert plan_document(saved) == json.loads(json.dumps(plan_document(bert_plan)))
    with page.expect_download() as download:
        page.locator("#download-trace").click()
    download.value.save_as(tmp_path / "saved.trace.json")
    trace = json.loads((tmp_path / "saved.trace.json").read_text())
    expected = json.loads(json.dumps(trace_document(analyse(bert_plan))))
    assert trace == expected


def test_random_traces_equal_the_commands(open_report, random_analyses, tmp_path):
    for analysis in random_analyses[:3]:
        page = open_report(analysis.plan)
        with page.expect_download() as download:
            page.locator("#download-trace").click()
        download.value.save_as(tmp_path / "saved.trace.json")
        events = json.loads((tmp_path / "saved.trace.json").read_text())["traceEvents"]
        expected = json.loads(json.dumps(trace_document(analysis)))["traceEvents"]
        assert len(events) == len(expected)
        for event, other in zip(events, expected, strict=True):
            # A half nanosecond may round either way.
            for name in ("ts", "dur"):
                assert event.pop(name, 0) == pytest.approx(other.pop(name, 0), abs=0.0011)
            assert event == other


def test_a_compressed_plan_downloads_too(open_report, drawn_plan, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeplan.report.html.MAX_PLAIN_PLAN_BYTES", 10)
    page = open_report(drawn_plan)
    with page.expect_download() as download:
        page.locator("#download-plan").click()
    download.value.save_as(tmp_path / "saved.plan.json")
    assert plan_document(read_plan(tmp_path / "saved.plan.json")) == json.loads(
        json.dumps(plan_document(drawn_plan))
    )


def test_hostile_names_do_nothing_but_show(open_report, hostile_plan):
    rows = [{"planner": "<script>window.hacked=1</script>", "iteration_ms": 1.0}]
    page = open_report(hostile_plan, rows)
    page.mouse.move(*point_of(page, "F", 0, 0))
    assert "</script><script>" in page.locator("#tip").inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 3
    assert page.locator("img").count() == 0
    assert "</script><script>" in page.locator("h1").inner_text()


def test_no_hostile_name_runs(browser, tmp_path):
    """All thirty pages; an alert, or a variable that a name could set, would show."""
    page = browser.new_context(viewport={"width": 900, "height": 700}).new_page()
    complaints: list[str] = []
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    for key, name in NAMES.items():
        path = tmp_path / f"{list(NAMES).index(key)}.html"
        write_report(plan_named(name), path)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.mouse.move(*point_of(page, "F", 0, 0))
        assert len(page.locator("#tip").inner_text()) < 400, key
        assert page.evaluate("window.hacked") is None, key
        assert page.locator("script").count() == 3, key
    assert complaints == []
    page.context.close()


def test_a_summary_moves_and_tells(open_report, bert_plan, monkeypatch):
    monkeypatch.setattr("pipeplan.report.page_data.MAX_ITEMS", 10)
    page = open_report(bert_plan)
    assert "A summary: this plan has" in page.locator(".summary").inner_text()
    for hidden in ("#critical", "#microbatch", "#by-device", "#download-trace"):
        assert not page.locator(hidden).is_visible()
    box = page.locator("#timeline").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + 50)
    page.mouse.move(*middle)
    told = page.locator("#tip").inner_text().split("\n")
    assert told[0] == "stage 0"
    assert told[2].startswith("busy ")
    whole = span_ms(page)
    zoom_by_wheel(page, whole, key="Control")
    page.locator("#timeline").focus()
    for key in ("ArrowRight", "ArrowDown", "b", "Enter", "c", "Escape", "0"):
        page.keyboard.press(key)
    assert span_ms(page) == pytest.approx(whole)
    with page.expect_download() as download:
        page.locator("#download-plan").click()
    assert download.value.suggested_filename == "bert-large-4x2-10g.plan.json"


def test_touch_pans_and_pinches(open_report, drawn_plan):
    page = open_report(drawn_plan, has_touch=True, viewport={"width": 390, "height": 844})
    page.locator("#timeline").scroll_into_view_if_needed()
    pinch = """() => {
      const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
      const y = box.top + 60, send = (type, pointerId, x) => canvas.dispatchEvent(
        new PointerEvent(type, {pointerId, clientX: x, clientY: y, pointerType: "touch"}));
      canvas.setPointerCapture = () => {};
      send("pointerdown", 1, 200); send("pointerdown", 2, 240);
      send("pointermove", 1, 160); send("pointermove", 2, 280);
      send("pointerup", 1, 160); send("pointerup", 2, 280);
      return pipeplan.state.to - pipeplan.state.from; }"""
    assert page.evaluate(pinch) == pytest.approx(14 / 3, rel=0.01)


def test_it_fits_a_phone_and_a_page(open_report, bert_plan):
    for options in ({"viewport": {"width": 390, "height": 844}, "has_touch": True}, {}):
        page = open_report(bert_plan, **options)
        if not options:
            page.emulate_media(media="print")
            page.set_viewport_size({"width": 794, "height": 1123})
        page.wait_for_timeout(50)
        wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1]


def test_chromium_renders_pixels(analysis, monkeypatch):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    monkeypatch.setattr(
        picture.shutil, "which", lambda name: CHROMIUM if name == "chromium" else None
    )
    pixels = picture.svg_to_png(timeline_svg(analysis, 600))
    assert pixels[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(pixels[16:20], "big") == 1200


def test_screenshots(open_report, bert_plan):
    """For people to look at: build/screenshots."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    rows = [
        {"planner": "spp", "iteration_ms": 965.2, "stages": 4},
        {"planner": "data-parallel", "reason": "needs 18.3 GB on h0d0 (16 GB)"},
    ]
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
    for name, options in (
        ("light", {}),
        ("dark", {"color_scheme": "dark"}),
        ("phone", {**phone, "has_touch": True}),
        ("print", {"viewport": {"width": 794, "height": 1123}}),
    ):
        page = open_report(bert_plan, rows, **options)
        if name == "print":
            page.emulate_media(media="print")
        if name == "dark":
            page.locator("#critical").check()
        page.wait_for_timeout(100)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
        assert (SCREENSHOTS / f"{name}.png").stat().st_size > 20_000


def test_paper_keeps_the_proportions_of_text(open_report, bert_plan):
    """A canvas that is squeezed in one direction only would squeeze its text."""
    page = open_report(bert_plan)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    for width in (718, 1047):  # A4 upright and across
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(50)
        for name in ("timeline", "memory"):
            scale = page.evaluate(
                f"""() => {{ const c = document.getElementById("{name}");
                  const box = c.getBoundingClientRect();
                  return [box.width / c.width, box.height / c.height]; }}"""
            )
            assert scale[0] == pytest.approx(scale[1], rel=0.02)
    cells = page.evaluate(
        """() => [...document.querySelectorAll(".stages-table td")].filter(
          (cell) => cell.scrollWidth > cell.clientWidth + 1).length"""
    )
    assert cells == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_stages_unfold(open_report, large_plan):
    page = open_report(large_plan)
    rows = page.locator(".stages-table tbody tr")
    assert rows.count() == 20
    shown = sum(rows.nth(n).is_visible() for n in range(20))
    assert shown in (14, 15)
    page.locator("#all-stages").check()
    assert sum(rows.nth(n).is_visible() for n in range(20)) == 20
    page.locator("#all-stages").uncheck()
    page.emulate_media(media="print")
    assert sum(rows.nth(n).is_visible() for n in range(20)) == 20


def test_a_phone_shows_two_plans_and_the_memory(open_report, bert_plan, tmp_path):
    shown = SideBySide(heading="Two", words="Both.", plans={"one": bert_plan, "two": bert_plan})
    page = open_report(
        bert_plan, beside=shown, viewport={"width": 390, "height": 844}, has_touch=True
    )
    wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]
    assert page.locator(".beside svg").count() == 2
    bar = page.locator(".need .bar").first.bounding_box()
    assert bar["width"] > 250


def test_the_comparison_sorts_and_shows_timelines(browser, tmp_path):
    from pipeplan import compare, zoo

    path = tmp_path / "compared.html"
    found = compare(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 4, ["spp", "1f1b", "dapple"])
    rows = [*found.document()["rows"], {"planner": "none", "infeasible_reason": "no plan"}]
    write_report(found.fastest, path, rows, others=found.plans)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri())

    def order() -> list[str]:
        return page.locator("#comparison tbody tr td:first-child").all_inner_texts()

    def click(heading: str) -> None:
        page.get_by_role("button", name=heading, exact=True).click()

    times = {row.planner: row.iteration_ms for row in found.rows}
    by_time = sorted(times, key=times.get)
    click("iteration (ms)")
    assert order() == [*by_time, "none"]
    click("iteration (ms)")
    assert order() == [*reversed(by_time), "none"]
    click("speedup")  # the largest first
    assert order() == [*by_time, "none"]
    click("planner")
    assert order() == sorted(order())
    timelines = page.locator("details.other-plan svg")
    assert timelines.count() == len(times)
    assert not any(picture.is_visible() for picture in timelines.all())
    page.locator("#comparison a", has_text="dapple").click()
    shown = [
        each for each in page.locator("details.other-plan").all() if "dapple" in each.inner_text()
    ]
    assert shown[0].locator("svg").is_visible()
    page.close()
