"""`pipeplan profile`: files, tables, JSON, and one line for each mistake."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import pipeplan as pp
from command_line import run_command

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def users_folder(tmp_path, monkeypatch):
    """A folder with the user's module, which is on no path."""
    shutil.copy(HERE / "sample_models.py", tmp_path / "users_models.py")
    monkeypatch.chdir(tmp_path)


def profile(capfd, *options, build="build", batch="example_batch"):
    return run_command(
        capfd, "profile", f"users_models:{build}", "--batch", f"users_models:{batch}", *options
    )


LOSS = ("--loss", "users_models:loss_fn", "--targets", "users_models:example_targets")


def test_writes_a_model_that_can_be_planned(capfd):
    code, out, err = profile(
        capfd, *LOSS, "--at", "1,2", "--repeats", 2, "--name", "mine", "-o", "mine.model.json", "-q"
    )
    assert (code, err) == (0, "")
    model = pp.read_model("mine.model.json")
    assert (model.name, model.microbatch_size, model.num_layers) == ("mine", 4, 3)
    assert [layer.parameter_bytes for layer in model.layers] == [4 * 144, 0, 4 * 68]
    assert [times.microbatch_size for times in model.layers[0].at] == [1, 2]
    assert "mine, microbatches of 4: median of 2 runs on cpu" in out
    assert "The layers together take" in out
    plan = pp.plan(model, pp.zoo.cluster("4x2-10g"), microbatches=4)
    assert not pp.check(plan).errors


def test_json_and_estimates(capfd):
    code, out, _ = profile(capfd, *LOSS, "--estimate", "a100", "--json", build="Factory.build")
    found = json.loads(out)
    assert code == 0
    assert (found["device"], found["is_estimate"]) == ("A100", True)
    assert [layer["forward_flops"] for layer in found["layers"]] == [2 * 4 * 8 * 16, 0, 2 * 4 * 64]
    code, out, err = profile(capfd, "--estimate", "a100", "--dtype", "bfloat16")
    assert code == 0
    assert "estimated for A100" in out
    assert "nothing was written" in err
    code, out, err = profile(capfd, "--estimate", "1,1", "-o", "-", "-q")
    assert (code, err) == (0, "")
    assert json.loads(out)["format"] == "pipeplan.model/1"


@pytest.mark.parametrize(
    ("options", "names", "expected"),
    [
        ((), {"build": "biuld"}, "has no function 'biuld'; did you mean 'build'?"),
        ((), {"batch": "nothing"}, "--batch: 'users_models:nothing': the module"),
        ((), {"batch": "wrong_batch"}, "batch: the model cannot take it: RuntimeError: mat1"),
        ((), {"build": "one_layer"}, "has no list of at least 2 layers; name its layers"),
        ((), {"build": "with_nan"}, "the output of its layer '0' holds NaN"),
        ((), {"build": "broken"}, "model: cannot be built: ValueError: no weights here (users_"),
        ((), {"build": "too_large", "batch": "wide_batch"}, "--estimate a100"),
        (("--at", "1,x"), {}, "--at: 'x' is no microbatch size"),
        (("--device", "cuda"), {}, "--device: 'cuda' is not here"),
        (("--device", "nonsense"), {}, "--device: 'nonsense' is no device"),
        (("--targets", "users_models:build"), {}, "--targets: needs a --loss"),
        (("--loss", "elsewhere:f"), {}, "--loss: 'elsewhere:f': there is no module 'elsewhere'"),
        (("--loss", "a/mine.py:f"), {}, "there is no module 'a/mine.py' here; write a.mine:f"),
        (("--loss", "here"), {}, "--loss: 'here': is not of the form MODULE:FUNCTION"),
        (("--layers", "0,1"), {}, "layers: are 0, 1, but this nn.Sequential calls 0, 1, 2"),
    ],
)
def test_mistakes_take_one_line(capfd, options, names, expected):
    code, out, err = profile(capfd, *options, "-q", **names)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1


def test_a_module_that_cannot_be_imported(capfd):
    Path("half_done.py").write_text("import torch\nvalue = 1 / 0\n")
    code, out, err = run_command(
        capfd, "profile", "half_done:build", "--batch", "users_models:example_batch", "-q"
    )
    assert (code, out) == (2, "")
    assert "cannot be imported: ZeroDivisionError: division by zero (half_done.py:2)" in err
    assert err.count("\n") == 1
