"""Where nothing fits: exit code 3, and suggestions that do fit."""

import re
from dataclasses import replace

import pytest

from command_line import run_command
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.commands import progress
from pipeplan.documents.files import write_cluster
from pipeplan.errors import NoPlanError
from pipeplan.planning.door import plan
from pipeplan.planning.global_batch import scaled_model
from pipeplan.planning.suggestions import explain, least_that_fits, what_would_fit


def pairs(count: int, memory_gb: float):
    group = HostGroup(count=count, devices=2, bandwidth_gb_per_s=12.0, memory_gb=memory_gb)
    return expand_hosts("pairs", [group], between_hosts_gb_per_s=1.25)


def refusal(model, cluster, **options) -> NoPlanError:
    with pytest.raises(NoPlanError) as caught:
        plan(model, cluster, 8, **options)
    return caught.value


@pytest.mark.parametrize("memory_gb", [1.5, 2.4])
def test_every_suggestion_fits(memory_gb):
    model, cluster = zoo.model("bert-large"), pairs(2, memory_gb)
    error = refusal(model, cluster)
    found = what_would_fit(model, cluster, 8, error)
    assert found
    for suggestion in found:
        if match := re.fullmatch(
            r"with microbatch size (\d+) \(and (\d+) microbatches\)", suggestion
        ):
            size, number = map(int, match.groups())
            assert size * number == 32
            made = plan(scaled_model(model, size), cluster, number, effort=0.01)
        elif match := re.fullmatch(r"with (\d+) devices", suggestion):
            assert int(match[1]) > 4
            made = plan(model, pairs(int(match[1]) // 2, memory_gb), 8, effort=0.01)
        else:
            (need,) = re.fullmatch(r"with ([\d.]+) GB on each device", suggestion).groups()
            assert float(need) > memory_gb
            made = plan(model, pairs(2, float(need)), 8, effort=0.01)
        assert not check(made).warnings


def test_a_constraint_that_stands_in_the_way_is_named():
    model, cluster = zoo.model("bert-large"), pairs(2, 3.5)
    plan(model, cluster, 8, effort=0.01)
    error = refusal(model, cluster, max_stages=1)
    found = what_would_fit(model, cluster, 8, error, max_stages=1)
    assert found[0] == "without --max-stages"


def test_the_line_names_need_stage_and_remedies():
    error = NoPlanError("nothing fits", stage=2, devices=("a", "b"), need_gb=23.08, memory_gb=16.0)
    assert explain(error, ["with microbatch size 4", "with 6 devices"]) == (
        "no plan fits: the closest needs 23.1 GB on each device of stage 2, which has 16 GB;"
        " fits with microbatch size 4, or with 6 devices"
    )
    assert "--ignore-memory plans anyway" in explain(error, [])


def test_the_least_count_that_fits():
    for least in (1, 2, 5, 9, 13):
        assert least_that_fits(16, lambda count, least=least: count >= least) == least
    assert least_that_fits(4, lambda count: count > 4) is None


def test_the_command_ends_with_3_and_one_line(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "QUIET_S", 1000.0)
    write_cluster(pairs(2, 2.0), tmp_path / "c.json")
    code, out, err = run_command(capfd, "plan", "bert-large", tmp_path / "c.json", "-m", 8)
    assert (code, out) == (3, "")
    assert err.startswith("pipeplan: no plan fits: the closest needs ")
    assert "; fits with " in err
    assert err.count("\n") == 1


def test_a_need_just_above_what_there_is_looks_like_more():
    error = NoPlanError("", stage=4, devices=("h2d0",), need_gb=1.8508, memory_gb=1.85)
    assert "needs 1.851 GB on 'h2d0' in stage 4, which has 1.85 GB" in explain(error, ["x"])


def test_memory_for_uneven_devices_is_the_least_of_each():
    """Those that have more keep it: the plan that was tried uses that."""
    cluster = pairs(2, 2.0)
    roomy = replace(cluster.devices[0], memory_gb=30.0)
    cluster = replace(cluster, devices=(roomy, *cluster.devices[1:]))
    error = NoPlanError("", stage=0, devices=("h0d1",), need_gb=6.0, memory_gb=2.0)
    found = what_would_fit(zoo.model("bert-large"), cluster, 8, error)
    assert found[-1].startswith("with at least 6.01 GB on each device")
