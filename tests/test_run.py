"""What `pipeplan.run` does with a plan that has more replicas than rows."""

from instances import even_model, flat_cluster
from pipeplan.planning import plan
from pipeplan.run import _runnable


def test_plans_that_cannot_run_are_planned_anew(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    model, cluster = even_model(8, 1, 2), flat_cluster(4)  # one row in a microbatch
    too_wide = plan(model, cluster, 4, "data-parallel")
    anew = _runnable(too_wide)
    assert {stage.num_replicas for stage in anew.stages} == {1}
    assert "more replicas than a microbatch has rows" in capsys.readouterr().err
    assert _runnable(anew) is anew
