"""A global batch: the profile at other sizes, the size that is chosen, and what is said of it."""

import json
from dataclasses import replace

import pytest

from command_line import run_command
from instances import even_model, flat_cluster
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.commands import progress
from pipeplan.documents.files import read_plan, write_plan
from pipeplan.errors import InputError, NoPlanError
from pipeplan.planning.door import plan
from pipeplan.planning.global_batch import plan_global_batch, scaled_model


def test_all_but_the_parameters_grows_with_the_size():
    model = zoo.model("bert-large")
    scaled = scaled_model(model, 6)
    assert scaled.microbatch_size == 6
    assert scaled.input_bytes == pytest.approx(1.5 * model.input_bytes)
    for before, after in zip(model.layers, scaled.layers, strict=True):
        for field in ("forward_ms", "backward_ms", "output_bytes", "gradient_bytes"):
            assert getattr(after, field) == pytest.approx(1.5 * getattr(before, field))
        assert after.activation_bytes == pytest.approx(1.5 * before.activation_bytes)
        assert after.parameter_bytes == before.parameter_bytes
        assert after.name == before.name
    assert scaled_model(model, 4) is model


def test_a_size_out_of_the_profile_s_limits_is_refused():
    model = zoo.model("bert-large")
    tiny = replace(model, layers=(replace(model.layers[0], forward_ms=1e-6), *model.layers[1:]))
    with pytest.raises(InputError, match="microbatch_size: 1 takes the profile out of its limits"):
        scaled_model(tiny, 1)


def test_the_chosen_size_is_the_best_of_all_divisors():
    model, cluster = zoo.model("bert-large"), zoo.cluster("4x2-10g")
    made = plan_global_batch(model, cluster, 48, effort=0.05)
    assert made.microbatches * made.model.microbatch_size == 48
    assert made.options["global_batch"] == 48
    assert made.options["profiled_microbatch_size"] == 4
    assert check(made).ok
    times_ms = {
        size: plan(scaled_model(model, size), cluster, 48 // size, effort=0.05).iteration_ms
        for size in (1, 2, 3, 4, 6, 8, 12)
    }
    assert made.iteration_ms <= min(times_ms.values()) * (1 + 1e-6)


def test_a_size_that_needs_too_much_memory_is_not_chosen():
    model = zoo.model("bert-large")
    roomy = plan_global_batch(model, zoo.cluster("4x2-10g"), 64, effort=0.05)
    group = HostGroup(count=4, devices=2, bandwidth_gb_per_s=12.0, memory_gb=3.0)
    tight = expand_hosts("tight", [group], between_hosts_gb_per_s=1.25)
    made = plan_global_batch(model, tight, 64, effort=0.05)
    assert not check(made).warnings
    assert max(made.predicted.peak_memory_gb.values()) <= 3.0
    assert made.model.microbatch_size <= roomy.model.microbatch_size
    none = expand_hosts(
        "none", [replace(group, memory_gb=0.2, count=2)], between_hosts_gb_per_s=1.25
    )
    with pytest.raises(NoPlanError):
        plan_global_batch(model, none, 8, effort=0.05)


def test_a_size_whose_bound_is_no_better_is_left_out(monkeypatch):
    # One device and no communication: every size takes as long, and the bound knows it.
    planned = []

    def counted(model, *arguments, **options):
        planned.append(model.microbatch_size)
        return plan(model, *arguments, **options)

    monkeypatch.setattr("pipeplan.planning.global_batch.make_plan", counted)
    made = plan_global_batch(even_model(4, 1.0, 2.0), flat_cluster(1), 24, effort=0.05)
    assert planned == [made.model.microbatch_size]
    assert made.iteration_ms == pytest.approx(24 * 4 * 3)


def test_the_same_batch_gives_the_same_plan(tmp_path):
    model, cluster = zoo.model("vgg19"), zoo.cluster("4x2-10g")
    texts = []
    for name in ("a", "b"):
        write_plan(plan_global_batch(model, cluster, 360, effort=0.05), tmp_path / name)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("batch", [0, -8, 2.5, 10**12])
def test_an_impossible_batch_is_refused(batch):
    with pytest.raises(InputError, match="global_batch"):
        plan_global_batch(zoo.model("vgg19"), zoo.cluster("4x2-10g"), batch)


# ------------------------------------------------------------------------- command line


@pytest.fixture
def run(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress, "QUIET_S", 1000.0)
    return lambda *arguments: run_command(capfd, *arguments)


def test_the_command_says_how_the_profile_was_scaled(run, tmp_path):
    output = tmp_path / "p.json"
    model, cluster = "bert-large", "4x2-10g"
    code, out, err = run(
        "plan", model, cluster, "--global-batch", 96, "--effort", 0.05, "-o", output
    )
    assert (code, err) == (0, "")
    made = read_plan(output)
    size = made.model.microbatch_size
    assert made.microbatches * size == 96
    said = f"global batch 96: {made.microbatches} microbatches of {size}"
    assert said in out
    assert ("scaled linearly from the profile's 4" in " ".join(out.split())) == (size != 4)
    assert json.loads(output.read_text())["model"]["microbatch_size"] == size


def test_two_ways_to_say_the_microbatches_are_one_too_many(run):
    code, out, err = run("plan", "vgg19", "4x2-10g", "-m", 4, "--global-batch", 64)
    assert (code, out) == (2, "")
    assert err == "pipeplan: -m: stands beside --global-batch, which chooses it; keep one of them\n"
