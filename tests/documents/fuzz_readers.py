"""Feeds mutants of valid documents to the readers; a separate program, so that its memory is known.

A mutant is read or refused by a `PipeplanError` of one line. What is read can be written, and reads
again as an equal object; `check` and `simulate` take it or refuse it.
"""

import copy
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from instances import HOSTILE_NAMES, hostile_plan, random_cluster, random_model
from pipeplan.checker import check
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.documents import files
from pipeplan.documents.json_text import to_json
from pipeplan.errors import PipeplanError
from pipeplan.pipeline import Bound, BoundLimit, BoundScope
from pipeplan.planning.door import plan
from pipeplan.replaying import simulate

LIMIT_S = 5.0
KINDS = {
    "model": (files.read_model, files.write_model),
    "cluster": (files.read_cluster, files.write_cluster),
    "plan": (files.read_plan, files.write_plan),
}
NUMBERS = [0, -0.0, -1, 1, 0.5, 1e-6, 9e-7, 1e-3, 1e3, 1e9, 1e12, 1.1e12, 1e18, 1e19, 5e-324, 1e308]
NUMBERS += [float("nan"), float("inf"), -float("inf"), 2**31, 2**63, 2**64, 10**30, 10**400]
JUNK = [None, True, False, "", "x", "F0", "B1", "full", "any", [], {}, [[]], [None], {"name": "x"}]
JUNK += ["\ud800", "pipeplan.plan/1", "pipeplan.plan/2", [0, 1], ["h0d0"], *HOSTILE_NAMES]
TOKENS = [
    b"",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b":",
    b"-",
    b"\\",
    b"\n",
    b"\x00",
    b"\xff",
    b"&a ",
]
TOKENS += [
    b"*a",
    b"!!float ",
    b"<<: *a",
    b"? ",
    b"| ",
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b'"name": 1, ',
]
TOKENS += [b'"schedule": [["F0"]], ', b"[" * 40, b"{'a': " * 40, b"# ", b"---\n", b"\xef\xbb\xbf"]
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def valid_documents() -> list[tuple[str, dict]]:
    """Documents of all three kinds, with every optional field in some of them."""
    rng = random.Random(0)
    made = []
    for _ in range(4):
        model, cluster = random_model(rng, 3), random_cluster(rng, 3)
        model = replace(model, tied=(("layer0", "layer2"),))
        hosts = expand_hosts(
            "h",
            [HostGroup(count=2, devices=2, bandwidth_gb_per_s=12.0, memory_gb=16.0, speed=2.0)],
            between_hosts_gb_per_s=1.25,
            latency_us=5.0,
        )
        made += [("model", files.model_document(model))]
        made += [("cluster", files.cluster_document(each)) for each in (cluster, hosts)]
        for each in (cluster, hosts):
            planned = plan(model, each, 3, rng.choice(["spp", "gpipe", "best"]), num_threads=1)
            bound = Bound(lower_bound_ms=0.5, scope=BoundScope.ANY, limits=(BoundLimit.MEMORY,))
            bounded = replace(planned, predicted=replace(planned.predicted, bound=bound))
            made += [("plan", files.plan_document(p)) for p in (planned, bounded)]
        made += [("plan", files.plan_document(hostile_plan(rng)))]
    return [(kind, json.loads(to_json(document))) for kind, document in made]


# --------------------------------------------------------------------------- mutation


def places(value, path=()):
    """The paths of everything in a document."""
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from places(entry, (*path, key))


def mutate(rng: random.Random, document: dict) -> None:
    """One change at a random place, by what stands there."""
    path = rng.choice(list(places(document)) or [()])
    if not path:
        return
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    key, value = path[-1], inner[path[-1]]
    how = rng.randrange(10)
    if how == 0:
        del inner[key]
    elif how == 1 and isinstance(inner, dict):
        misspelt = rng.choice([key[:-1], f"{key}x", key.upper(), rng.choice(HOSTILE_NAMES)])
        inner[misspelt] = inner.pop(key) if rng.random() < 0.5 else [None]
    elif how == 1:
        inner.insert(key, copy.deepcopy(value))
    elif how == 2:
        inner[key] = [value, copy.deepcopy(value)]
    elif how == 3:
        for _ in range(rng.choice([1, 40])):
            inner[key] = [inner[key]]
    elif how == 4 and isinstance(value, list):
        rng.shuffle(value)
    elif how == 5 and isinstance(value, list) and value:
        inner[key] = value * rng.choice([2, 1000])
    elif isinstance(value, int | float) and how < 9:
        scaled = float(value) * 10.0 ** rng.randint(-20, 20) if abs(value) < 1e300 else value
        inner[key] = rng.choice([*NUMBERS, value, scaled])
    elif isinstance(value, str) and how < 9:
        inner[key] = rng.choice([*HOSTILE_NAMES, value, value[:-1], "\ud800"])
    else:
        inner[key] = copy.deepcopy(rng.choice([*JUNK, *NUMBERS]))


def damage(rng: random.Random, data: bytes) -> bytes:
    """A change of the bytes themselves."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(damaged) + 1)
        how = rng.randrange(4)
        if how == 0:
            del damaged[at:]
        elif how == 1 and at < len(damaged):
            damaged[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            damaged[at : at + rng.randrange(4)] = rng.choice(TOKENS)
        else:
            end = at + rng.randrange(200)
            damaged[at:at] = damaged[at:end]
    return bytes(damaged)


def mutant(rng: random.Random, valid: list[tuple[str, dict]]) -> tuple[str, str, bytes]:
    """A kind, a suffix and the bytes of a file."""
    kind, document = rng.choice(valid)
    document = copy.deepcopy(document)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        mutate(rng, document)
    if rng.random() < 0.25:
        suffix = ".yaml"
        try:
            text = yaml.dump(document, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
        except UnicodeEncodeError:  # half a character
            text = "name: x"
    else:
        suffix = ".json"
        ascii_only, indent = rng.random() < 0.5, rng.choice([None, None, 1])
        text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    data = text.encode(errors="surrogatepass")
    if rng.random() < 0.3:
        data = damage(rng, data)
    if rng.random() < 0.02:
        kind = rng.choice(list(KINDS))
    return kind, suffix, data


# --------------------------------------------------------------------------- judgement


def judge(kind: str, path: Path) -> bool:
    """Whether the mutant was read; what must not happen raises."""
    read, write = KINDS[kind]
    try:
        loaded = read(path)
    except PipeplanError as problem:
        message = str(problem)
        assert len(message.splitlines()) == 1, message
        assert len(message) < 700, message
        return False
    again = path.with_name("again.json")
    write(loaded, again)
    assert read(again) == loaded, "reads again as something else"
    if kind == "plan":
        for use in (check, simulate):
            try:
                use(loaded)
            except PipeplanError as problem:
                assert str(problem)  # noqa: PT017
    return True


def hang(*_: object) -> None:
    raise TimeoutError(f"takes more than {LIMIT_S} s")


def main(num_mutants: int, seed: int) -> None:
    os.fsync = lambda _: None  # nobody pulls the plug here
    signal.signal(signal.SIGPROF, hang)
    valid = valid_documents()
    rng = random.Random(seed)
    num_read, slowest_s, failures = 0, 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(num_mutants):
            kind, suffix, data = mutant(rng, valid)
            path = Path(folder) / f"mutant{suffix}"
            path.write_bytes(data)
            start_s = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            try:
                num_read += judge(kind, path)
            except Exception:
                failures.append([index, kind, suffix, traceback.format_exc()[-2000:]])
            signal.setitimer(signal.ITIMER_PROF, 0)
            slowest_s = max(slowest_s, time.process_time() - start_s)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    summary = {"read": num_read, "slowest_s": slowest_s, "megabytes": megabytes}
    json.dump({**summary, "num_failures": len(failures), "failures": failures[:5]}, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
