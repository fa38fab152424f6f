"""trace.json: what stands in it, that no spans of a lane overlap, threads, crashes, restarts."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.stats import trace
from megarl.stats.tracker import StatsTracker

WAIT_S = 120.0
SERVER = trace.server("http://127.0.0.1:8000")


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "trace.json"
    trace.stop()


def read(path):
    """All events but those that name lanes, and {(pid, tid): (process, lane)}."""
    text = path.read_text()
    assert text.endswith(("[\n", ",\n"))
    events = json.loads(text + "{}]")[:-1]
    names = defaultdict(dict)
    for event in events:
        if event["ph"] == "M":
            names[event["pid"], event["tid"]][event["name"]] = event["args"]
    lanes = {
        ids: (found["process_name"]["name"], found["thread_name"]["name"])
        for ids, found in names.items()
    }
    return [event for event in events if event["ph"] != "M"], lanes


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_have_names_places_times_and_arguments(path):
    trace.start(path)
    now = time.monotonic()
    trace.span("request", SERVER, now - 1.5, now - 1.0, rid="a", versions=[1, 2], mean=0.5)
    trace.instant("lost", trace.server("http://127.0.0.1:8000", "state"), why="killed")
    trace.stop()
    (request, lost), lanes = read(path)
    assert (request["name"], request["ph"], request["dur"]) == ("request", "X", 500_000)
    assert request["args"] == {"rid": "a", "versions": [1, 2], "mean": 0.5}
    assert abs(request["ts"] / 1e6 - (time.time() - 1.5)) < 60
    assert lanes[request["pid"], request["tid"]] == ("server 127.0.0.1:8000", "requests")
    assert (lost["ph"], lost["s"], lost["args"]) == ("i", "t", {"why": "killed"})
    assert lanes[lost["pid"], lost["tid"]] == ("server 127.0.0.1:8000", "state")
    assert lost["pid"] == request["pid"] != 0
    assert 0 < lost["tid"] != request["tid"]


def test_nothing_is_written_while_nothing_is_recorded(path):
    trace.span("request", SERVER, 0.0, 1.0)
    assert not trace.is_on()
    trace.start(path)
    assert trace.is_on()
    trace.stop()
    trace.instant("late", SERVER)
    assert read(path) == ([], {})


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=60).map(
        lambda spans: sorted((min(s), max(s)) for s in spans)
    )
)
def test_spans_of_a_lane_never_overlap(spans):
    lines = trace._Lines(to_epoch_s=0.0)
    by_lane = defaultdict(list)
    for start, end in sorted(spans, key=lambda s: s[1]):  # as they are told: when they end
        made = lines.of(trace._Event("r", SERVER, float(start), float(end), {}))
        event = json.loads(made[-1].removesuffix(",\n"))
        assert event["dur"] == (end - start) * 1_000_000
        by_lane[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for of_lane in by_lane.values():
        of_lane.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(of_lane))
    if all(a[1] <= b[0] for a, b in itertools.pairwise(spans)):
        assert len(by_lane) == 1


def test_threads_tell_at_the_same_time(path):
    trace.start(path)

    def tell(index):
        for i in range(2000):
            trace.span("request", SERVER, float(i), i + 1.0, who=index, i=i)

    threads = [threading.Thread(target=tell, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    trace.stop()
    events, _ = read(path)
    told = {(event["args"]["who"], event["args"]["i"]) for event in events}
    assert told == {(who, i) for who in range(4) for i in range(2000)}


def test_events_reach_the_file_while_the_run_goes_on(path):
    trace.start(path)
    trace.instant("now", SERVER)
    wait_for(lambda: "now" in path.read_text())
    assert trace.is_on()


def test_what_is_too_much_for_the_queue_is_counted(path, monkeypatch, caplog):
    monkeypatch.setattr(trace, "MAX_QUEUED", 10)
    monkeypatch.setattr(trace, "FLUSH_S", WAIT_S)  # nothing is taken out before the end
    trace.start(path)
    for i in range(25):
        trace.instant("event", SERVER, i=i)
    trace.stop()
    events, _ = read(path)
    assert [event["args"]["i"] for event in events] == list(range(10))
    assert "15 lines are missing" in caplog.text


def test_values_that_json_has_not_become_text(path):
    trace.start(path)
    trace.instant("odd", SERVER, x=float("nan"), y=(1, float("inf")), z={1}, none=None, ok=True)
    trace.stop()
    ((event,), _) = read(path)
    assert event["args"] == {"x": "nan", "y": [1, "inf"], "z": "{1}", "none": None, "ok": True}


KILLED = """
import os, signal, sys, time
from pathlib import Path
from megarl.stats import trace
path = Path(sys.argv[1])
trace.start(path)
trace.instant("first life", trace.server("http://127.0.0.1:8000"))
while "first life" not in path.read_text():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_goes_on_in_the_same_file_and_lanes(path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=WAIT_S, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(read(path)[0]) == 1
    with path.open("a") as file:
        file.write('{"name":"half a li')
    trace.start(path)
    trace.instant("second life", SERVER)
    trace.stop()
    (first, second), lanes = read(path)
    assert (first["name"], second["name"]) == ("first life", "second life")
    assert (first["pid"], first["tid"]) != (second["pid"], 0)
    assert first["pid"] == second["pid"]
    assert first["tid"] == second["tid"]
    assert len(lanes) == 1
    assert second["ts"] >= first["ts"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (b"", b""),
        (b"[\n", b"[\n"),
        (b"[", b""),
        (b"[\n{},\n{", b"[\n{},\n"),
        (b"[\n" + b"x" * 200_000, b"[\n"),
        (b"y" * 70_000, b""),
        (b"[\n" + b"{},\n" * 20_000 + b"z" * 65_535, b"[\n" + b"{},\n" * 20_000),
    ],
)
def test_only_whole_lines_stay(tmp_path, text, kept):
    path = tmp_path / "trace.json"
    path.write_bytes(text)
    trace.cut_torn_line(path)
    assert path.read_bytes() == kept
    trace.cut_torn_line(tmp_path / "not there")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_does_not_end_the_run(path, caplog):
    path.symlink_to("/dev/full")
    trace.start(path)
    trace.instant("event", SERVER)
    trace.stop()
    assert caplog.text.count("No space left on device") == 1
    assert "5 lines are missing" in caplog.text  # bracket, names of the lane, event


def test_timed_phases_are_on_the_time_line(path):
    stats = StatsTracker()
    trace.start(path)
    with pytest.raises(RuntimeError), stats.record_timing("rollout"):
        raise RuntimeError
    trace.stop()
    ((event,), lanes) = read(path)
    assert event["name"] == "rollout"
    assert lanes[event["pid"], event["tid"]] == ("trainer", "phases")
    assert stats.export()["timeperf/rollout"] * 1e6 >= event["dur"]
