"""Commands on a plan of the second version."""

from pathlib import Path

from command_line import run_command

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "families.plan.json")


def test_a_device_with_several_stages_counts_once(capfd):
    code, out, _ = run_command(capfd, "whatif", EXAMPLE, "--slower", "h0d1=0.5")
    assert code == 0
    (today,) = [line for line in out.splitlines() if line.startswith("today")]
    assert today.split()[-2:] == ["8", "8"]  # stages, devices


def test_the_example_is_valid_and_exports(capfd, tmp_path):
    assert run_command(capfd, "check", EXAMPLE)[0] == 0
    target = tmp_path / "order.csv"
    code, _, err = run_command(capfd, "export", EXAMPLE, "--to", "torch-csv", "-o", str(target))
    assert code == 0
    assert "cannot say gradient buckets" in err
    assert target.read_text().startswith("0F0,0F1")
    code, _, err = run_command(capfd, "export", EXAMPLE, "--to", "deepspeed", "-o", str(target))
    assert code == 3
    assert "deepspeed: the plan has several stages a device" in err
