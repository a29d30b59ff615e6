"""What newcomers get wrong: tabs, YAML named .json, missing files, other units; and --quiet."""

import pytest

from command_line import run_command

CLUSTER = """format: pipeplan.cluster/1
name: mine
hosts:
  - {count: 1, devices: 2, bandwidth_gb_per_s: RATE, memory_gb: MEMORY}
"""


@pytest.fixture
def plan_on(capfd, tmp_path):
    """Plans on a cluster file with this text: exit code, stdout, stderr."""

    def plan_on(text: str, name: str = "mine.yaml", *options: str) -> tuple[int, str, str]:
        path = tmp_path / name
        path.write_text(text)
        return run_command(capfd, "plan", "vgg19", path, "-m", 4, "--effort", 0.1, *options)

    return plan_on


def cluster(rate: float = 12, memory: float = 32) -> str:
    return CLUSTER.replace("RATE", str(rate)).replace("MEMORY", str(memory))


def test_a_tab_in_yaml(plan_on):
    code, out, err = plan_on(cluster().replace("  - {", "\t- {"))
    assert (code, out) == (2, "")
    assert err.endswith("mine.yaml: line 4 is indented with a tab; YAML wants spaces\n")


def test_yaml_under_the_name_of_json(plan_on):
    code, out, err = plan_on(cluster(), "mine.cluster.json")
    assert (code, out) == (2, "")
    assert err.endswith("is YAML, not JSON; rename it to mine.cluster.yaml\n")


def test_broken_json_is_called_json(plan_on):
    assert "is not JSON" in plan_on('{"format": "pipeplan.cluster/1",', "mine.json")[2]


@pytest.mark.parametrize("name", ["missing.cluster.json", "folder/missing", "missing.yaml"])
def test_a_missing_file_is_not_answered_with_the_zoo(name, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command(capfd, "plan", "vgg19", name)
    assert code == 2
    assert err == f"pipeplan: {name}: cannot be read: No such file or directory\n"


def test_a_misspelt_name_of_the_zoo(capfd):
    code, _, err = run_command(capfd, "plan", "vgg19", "4x2-10")
    assert code == 2
    assert "did you mean '4x2-10g'?" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (cluster(memory=24576), "memory_gb: 24576 GB is more than devices have; is it in MB?"),
        (cluster(rate=12000), "bandwidth_gb_per_s: 12000 GB/s is faster than links are"),
    ],
)
def test_other_units_are_noted(text, said, plan_on):
    code, out, err = plan_on(text)
    assert code == 0
    assert said in err
    assert out.startswith("vgg19 on mine")
    assert plan_on(text, "mine.yaml", "--quiet") == (0, out, "")


def test_usual_units_are_not(plan_on):
    assert plan_on(cluster())[2] == ""
