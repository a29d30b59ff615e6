"""Charts of sweeps: the right points, nothing averaged or left out without a word; SVG and PDF."""

import math
import re
import zlib
from xml.etree import ElementTree

import pytest

import pipeplan as pp
from command_line import run_command
from hostile_names import NAMES
from pipeplan.planning.sweep.cases import SweepRow
from pipeplan.report.chart_picture import ChartStyle, chart_svg
from pipeplan.report.pdf import pdf_font, svg_to_pdf
from pipeplan.report.sweep_rows import ChartOptions, chart_of, read_rows


def row(planner: str, devices: int, iteration_ms: float | None, **more) -> SweepRow:
    given = {
        "model": "bert",
        "cluster": f"{devices} devices",
        "microbatches": 8,
        "seed": 0,
        "cluster_devices": devices,
        "fits_memory": True,
        "has_whole_samples": True,
    }
    return SweepRow(planner=planner, iteration_ms=iteration_ms, **(given | more))


ROWS = [
    row("best", 4, 50.0, lower_bound_ms=40.0),
    row("best", 8, 25.0, lower_bound_ms=25.0),
    row("data-parallel", 4, 100.0, fits_memory=False),
    row("data-parallel", 8, 75.0),
    row("gpipe", 8, None, error="no plan"),
]


def points(chart) -> dict[str, list[tuple[float, float]]]:
    return {s.name: [(p.x, p.y) for p in s.points] for s in chart.series}


def test_speedups_are_over_the_plan_of_the_same_case():
    chart = chart_of(ROWS, ChartOptions(x="devices", y="speedup"))
    assert points(chart) == {"best": [(4, 2), (8, 3)], "data-parallel": [(4, 1), (8, 1)]}
    assert chart.notes == ("1 row without speedup left out",)
    other = chart_of(ROWS, ChartOptions(x="devices", y="speedup", over="best"))
    assert points(other)["data-parallel"] == [(4, 0.5), (8, pytest.approx(1 / 3))]


def test_gaps_are_in_per_cent():
    chart = chart_of(ROWS, ChartOptions(x="devices", y="gap"))
    assert points(chart) == {"best": [(4, pytest.approx(25)), (8, 0)]}


def test_names_become_categories():
    chart = chart_of(ROWS, ChartOptions(x="planner", y="iteration", by=("cluster",)))
    assert chart.categories == ("best", "data-parallel")
    assert points(chart)["8 devices"] == [(0, 25), (1, 75)]


def test_plans_that_break_limits_are_marked():
    chart = chart_of(ROWS, ChartOptions(x="devices", y="iteration_ms"))
    marked = {(s.name, p.x): p.breaks_limits for s in chart.series for p in s.points}
    assert [place for place, broken in marked.items() if broken] == [("data-parallel", 4)]
    assert "hollow: breaks a limit" in chart_svg(chart, ChartStyle())


def test_a_mean_is_geometric_and_shows_its_range():
    rows = [row("best", 4, 10.0), row("best", 4, 40.0, model="vgg")]
    chart = chart_of(rows, ChartOptions(x="devices", y="iteration_ms", mean=True))
    (point,) = chart.series[0].points
    assert (point.y, point.low, point.high) == (pytest.approx(20), 10, 40)
    assert "geometric means" in chart_svg(chart, ChartStyle())


REFUSED = {
    "several": (
        {},
        r"2 of 'best' lie at cluster_devices 4, and differ in model; .* by planner,mod",
    ),
    "column": ({"y": "iteration_msec"}, r"y: 'iteration_msec' is no column; .*iteration_ms"),
    "where": ({"where": {"model": "gpt"}}, "where: no row has model=gpt"),
    "where column": ({"where": {"modle": "gpt"}}, "where: 'modle' is no column"),
    "text": ({"y": "model", "where": {"model": "vgg"}}, "'vgg' in column 'model' is not a number"),
    "reference": ({"y": "speedup"}, "no row is of planner 'data-parallel'; choose one of best"),
    "over": ({"over": "best"}, "over: 'best' is for y = speedup"),
    "empty": ({"y": "lower_bound_ms"}, "no row has a value of 'lower_bound_ms'"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(changed, message):
    rows = [row("best", 4, 10.0), row("best", 4, 40.0, model="vgg")]
    with pytest.raises(pp.InputError, match=message):
        chart_of(rows, ChartOptions(**({"x": "devices", "y": "iteration_ms"} | changed)))


def test_too_many_lines_are_refused():
    rows = [row(f"planner {n}", 4, 10.0) for n in range(13)]
    with pytest.raises(pp.InputError, match="13 lines, more than 12"):
        chart_of(rows, ChartOptions(x="devices", y="iteration_ms"))


def test_points_lie_where_their_values_say():
    """Ticks and circles share one scale: 50 ms lies halfway between the labels 0 and 100."""
    rows = [row("best", 4, 50.0), row("best", 8, 100.0)]
    svg = chart_svg(chart_of(rows, ChartOptions(x="devices", y="iteration_ms")), ChartStyle())
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own picture
    tag = "{http://www.w3.org/2000/svg}"
    places = [float(c.attrib["cy"]) for c in root.iter(f"{tag}circle")][:2]
    texts = [t for t in root.iter(f"{tag}text") if t.attrib["text-anchor"] == "end"]
    labels = {t.text: float(t.attrib["y"]) for t in texts}
    shift = 0.35 * 12
    assert places[0] == pytest.approx((labels["0"] + labels["100"]) / 2 - shift, abs=0.1)
    assert places[1] == pytest.approx(labels["100"] - shift, abs=0.1)


# --------------------------------------------------------------------------------- PDF


def pdf_content(data: bytes) -> str:
    """The drawing of a PDF; its table of objects has to point at them."""
    start = int(re.search(rb"startxref\n(\d+)\n%%EOF\n$", data)[1])
    assert data[start:].startswith(b"xref\n0 7\n")
    for number, offset in enumerate(re.findall(rb"(\d{10}) 00000 n ", data[start:]), 1):
        assert data[int(offset) :].startswith(f"{number} 0 obj\n".encode())
    length = int(re.search(rb"/Length (\d+)", data)[1])
    begin = data.index(b"stream\n") + len(b"stream\n")
    assert data[begin + length :].startswith(b"\nendstream")
    return zlib.decompress(data[begin : begin + length]).decode("latin-1")


def test_a_pdf_draws_what_the_svg_draws():
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100" font-family="Times">'
        '<rect x="10" y="20" width="30" height="40" fill="#ff0000"/>'
        '<path d="M1 2L3 4h5v-6z" fill="none" stroke="#0000ff" stroke-dasharray="2 3"/>'
        '<g font-size="10" text-anchor="end" fill="#000000"><text x="50" y="60">a(b)é</text></g>'
        "</svg>"
    )
    data = svg_to_pdf(svg)
    assert b"/MediaBox [0 0 150 75]" in data
    assert b"/BaseFont /Times-Roman" in data
    lines = pdf_content(data).splitlines()
    assert lines[0] == "0.75 0 0 -0.75 0 75 cm"
    assert lines[1:3] == ["1 0 0 rg", "10 20 30 40 re f"]
    assert lines[3:5] == ["0 0 1 RG 1 w [2 3] 0 d", "1 2 m 3 4 l 8 4 l 8 -2 l h S"]
    width = 10 * (444 + 333 + 500 + 333 + 500) / 1000
    assert lines[5] == (f"0 0 0 rg BT /F1 10 Tf 1 0 0 -1 {50 - width:.3g} 60 Tm (a\\(b\\)é) Tj ET")


def test_a_circle_closes():
    svg = '<svg width="9" height="9"><circle cx="5" cy="4" r="2" fill="#000000"/></svg>'
    path = pdf_content(svg_to_pdf(svg)).splitlines()[-1]
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", path)]
    start, places = numbers[:2], numbers[2:]
    ends = [tuple(places[at + 4 : at + 6]) for at in range(0, 24, 6)]
    assert tuple(start) == (7, 4)
    assert ends == [(5, 6), (3, 4), (5, 2), (7, 4)]


def test_fonts_of_a_pdf():
    assert [pdf_font(name) for name in ("Arial", "Times New Roman", "DejaVu Sans Mono")] == [
        "sans",
        "serif",
        "mono",
    ]
    with pytest.raises(pp.InputError, match=r"font: a PDF has no 'Inter'; choose sans, serif"):
        pdf_font("Inter")


def test_characters_that_a_pdf_lacks_are_told():
    warnings = []
    svg = '<svg width="9" height="9"><text x="1" y="1" font-size="9" fill="#000000">{}</text></svg>'
    svg_to_pdf(svg.format("naïve …"), warnings.append)
    assert warnings == []
    assert "(??) Tj" in pdf_content(svg_to_pdf(svg.format("图表"), warnings.append))
    assert len(warnings) == 1


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_stay_text(name, tmp_path):
    rows = [row(name, 4, 50.0, model=name), row(name, 8, 25.0, model=name)]
    for suffix in ("svg", "pdf"):
        for x in ("devices", "planner"):
            path = tmp_path / f"chart.{suffix}"
            pp.plot_sweep(rows, path, x=x, y="iteration_ms", by="cluster" if x != "devices" else x)
            if suffix == "svg":
                root = ElementTree.fromstring(path.read_text())  # noqa: S314 - our own picture
                tags = {node.tag.rpartition("}")[2] for node in root.iter()}
                assert tags <= {"svg", "title", "rect", "path", "text", "circle"}
            else:
                pdf_content(path.read_bytes())


# ------------------------------------------------------------------------ command line


def test_the_command_draws_a_sweep(capfd, tmp_path):
    spec, results = tmp_path / "cases.yaml", tmp_path / "results.csv"
    spec.write_text(
        "format: pipeplan.sweep/1\nmodels: [vgg19]\nclusters: [4x2-10g, 2x8-100g]\n"
        "microbatches: [8]\nplanners: [1f1b, data-parallel]\n"
    )
    assert run_command(capfd, "sweep", spec, "-o", results, "--jobs", "1")[0] == 0
    options = ("--x", "devices", "--y", "speedup", "--log", "x", "--font", "serif")
    drawn = {}
    for name in ("a.svg", "a.pdf", "b.svg", "b.pdf"):
        code, _, err = run_command(capfd, "plot", results, "-o", tmp_path / name, *options)
        assert (code, err) == (0, "")
        drawn[name] = (tmp_path / name).read_bytes()
    assert drawn["a.svg"] == drawn["b.svg"]
    assert drawn["a.pdf"] == drawn["b.pdf"]
    text = pdf_content(drawn["a.pdf"])
    assert "(speed-up over data-parallel) Tj" in text
    for label in ("1f1b", "data-parallel", "8", "16"):
        assert f"({label}) Tj" in text
    rows = read_rows(results)
    assert [row["cluster_devices"] for row in rows] == [8, 8, 16, 16]
    assert rows[0]["fits_memory"] in (True, False)
    code, _, err = run_command(capfd, "plot", results, "-o", tmp_path / "a.svg", "--x", "devices")
    assert (code, "--y: is missing" in err) == (2, True)


def test_options_of_charts_are_refused_for_plans(capfd, tmp_path):
    plan = tmp_path / "p.plan.json"
    run_command(capfd, "plan", "vgg19", "4x2-10g", "--planner", "spp", "-o", plan)
    code, _, err = run_command(capfd, "plot", plan, "-o", tmp_path / "a.svg", "--x", "devices")
    assert (code, "--x: is for the results of a sweep" in err) == (2, True)
    assert run_command(capfd, "plot", plan, "-o", tmp_path / "p.pdf", "--font", "mono")[0] == 0
    content = pdf_content((tmp_path / "p.pdf").read_bytes())
    assert b"/Courier" in (tmp_path / "p.pdf").read_bytes()
    assert "(all-reduce) Tj" in content
    code, _, err = run_command(capfd, "plot", plan, "-o", tmp_path / "p.pdf", "--font", "Inter")
    assert (code, "a PDF has no 'Inter'" in err) == (2, True)


BROKEN = {
    "missing": (None, "cannot be read"),
    "empty": (b"", "has no rows"),
    "ragged": (b"x,y\n1,2,3\n", "longer than its first line"),
    "binary": (b"x,y\n\xff\xfe,1\n", "is not CSV in UTF-8"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_files_that_are_no_tables_are_refused(content, message, tmp_path):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(pp.InputError, match=message):
        pp.plot_sweep(path, tmp_path / "a.svg", x="x", y="y")


STYLES = {
    "log": ({"log": "z"}, "log: 'z' is none of"),
    "names": ({"log": "x", "x": "cluster"}, "has names, which have no logarithm"),
    "zero": ({"log": "y", "y": "gap"}, "'gap' has the value 0"),
    "width": ({"width": 10}, "width: 10 is not within"),
    "font size": ({"font_size": math.nan}, "font_size: nan is not within"),
    "font": ({"font": "x'; }"}, "is no name of a font"),
    "title": ({"title": "a\nb"}, "not printable"),
}


@pytest.mark.parametrize(("changed", "message"), STYLES.values(), ids=STYLES)
def test_styles_are_checked(changed, message, tmp_path):
    given = {"x": "devices", "y": "iteration_ms"} | changed
    with pytest.raises(pp.InputError, match=message):
        pp.plot_sweep(ROWS, tmp_path / "a.svg", **given)
