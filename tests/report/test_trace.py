import json
from collections import defaultdict
from itertools import pairwise

import pytest

from pipeplan.report.trace import TRACKS, trace_document, write_trace

REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "ts", "args"},
    **{phase: {"name", "cat", "id", "pid", "tid", "ts", "bp"} for phase in "stf"},
}


def slices_of(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def test_the_drawn_plan(analysis):
    events = trace_document(analysis)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "d0 (stage 0)", 2: "d2 (stage 0)", 1: "d1 (stage 1)"}
    tracks = slices_of(events)
    compute = [(e["name"], e["ts"], e["dur"]) for e in tracks[0, 0]]
    assert compute == [("F0", 0, 1e3), ("F1", 1e3, 1e3), ("B0", 6e3, 2e3), ("B1", 9e3, 2e3)]
    assert [(e["name"], e["ts"]) for e in tracks[2, 1]] == [("F0", 1e3), ("F1", 2e3)]
    assert [(e["name"], e["ts"]) for e in tracks[1, 4]] == [("B0", 5e3), ("B1", 8e3)]
    assert [(e["name"], e["ts"], e["dur"]) for e in tracks[0, 5]] == [("all-reduce", 11e3, 3e3)]
    assert tracks[0, 0][2]["args"] == {
        "microbatch": 0,
        "waited_for": "transfer of B0 from stage 1 to 0",
    }
    flow = [(e["ph"], e["pid"], e["ts"]) for e in events if e["ph"] in "stf" and e["id"] == 1]
    assert flow == [("s", 0, 1.5e3), ("t", 1, 5.5e3), ("t", 1, 7e3), ("f", 0, 10e3)]
    memory = {e["ts"]: e["args"]["GB"] for e in events if e["ph"] == "C" and e["pid"] == 1}
    assert memory == pytest.approx({0: 0, 2e3: 5, 5e3: 5, 8e3: 0})


def test_random_plans_follow_the_schema_and_no_track_overlaps(random_analyses):
    for analysis in random_analyses:
        document = json.loads(json.dumps(trace_document(analysis), allow_nan=False))
        assert set(document) == {"traceEvents", "displayTimeUnit"}
        for event in document["traceEvents"]:
            missing = REQUIRED[event["ph"]] - set(event)
            assert not missing, event
            assert event.get("ts", 0) >= 0
            assert event.get("dur", 0) >= 0
            assert 0 <= event.get("tid", 0) < len(TRACKS)
        for track in slices_of(document["traceEvents"]).values():
            track.sort(key=lambda e: (e["ts"], e["ts"] + e["dur"]))
            for event, after in pairwise(track):
                # Times are whole nanoseconds; their sums in microseconds round in the last digit.
                assert round((event["ts"] + event["dur"] - after["ts"]) * 1e3) <= 0


def test_random_plans_every_flow_step_is_inside_a_slice_of_its_microbatch(random_analyses):
    for analysis in random_analyses[:60]:
        events = trace_document(analysis)["traceEvents"]
        tracks = slices_of(events)
        for event in events:
            if event["ph"] in "stf":
                assert any(
                    e["args"]["microbatch"] == event["id"]
                    and e["ts"] - 1e-3 <= event["ts"] <= e["ts"] + e["dur"] + 1e-3
                    for e in tracks[event["pid"], event["tid"]]
                )


def test_random_plans_counters_never_exceed_the_peak(random_analyses):
    for analysis in random_analyses:
        most = defaultdict(float)
        for event in trace_document(analysis)["traceEvents"]:
            if event["ph"] == "C":
                most[event["pid"]] = max(most[event["pid"]], event["args"]["GB"])
        for stage, memory in zip(analysis.plan.stages, analysis.memory, strict=True):
            for device, peak_gb in zip(stage.devices, memory.peak_gb, strict=True):
                # Work of no length may hold more for no time at all.
                assert most[device] <= peak_gb * (1 + 1e-9) + 1e-12


def test_a_written_trace_reads_back(drawn_plan, analysis, tmp_path):
    write_trace(drawn_plan, tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written == json.loads(json.dumps(trace_document(analysis)))


def test_hostile_names_are_text(hostile_plan, tmp_path):
    write_trace(hostile_plan, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[0] == f"{hostile_plan.cluster.devices[0].name} (stage 0)"
