"""What `pipeplan.run` does with a plan that has more replicas than rows."""

import pytest

from instances import even_model, flat_cluster
from pipeplan.errors import InputError
from pipeplan.planning.door import plan
from pipeplan.run import _runnable


def test_plans_that_cannot_run_are_planned_anew(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    model, cluster = even_model(8, 1, 2), flat_cluster(4)  # one row in a microbatch
    too_wide = plan(model, cluster, 4, "data-parallel")
    anew = _runnable(too_wide, as_is=False)
    assert {stage.num_replicas for stage in anew.stages} == {1}
    assert "has 4 replicas, more than a microbatch has rows (1)" in capsys.readouterr().err
    assert _runnable(anew, as_is=True) is anew
    with pytest.raises(InputError, match="plan with --runnable, or leave out --as-is"):
        _runnable(too_wide, as_is=True)
