"""Estimates without running: FLOPs against formulas, bytes against what running holds."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from measure.model_samples import SAMPLES  # noqa: E402
from pipeplan.errors import InputError  # noqa: E402
from pipeplan.measure import measure_model  # noqa: E402
from pipeplan.measure.roofline import find_accelerator  # noqa: E402
from pipeplan.zoo.hardware import Precision  # noqa: E402

HUGGING_FACE = {"gpt2", "bert", "llama", "vit", "mixtral"}


def llama_of(layers, width, inner, heads, vocabulary):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=vocabulary,
        )
    )


def test_flops_of_a_large_llama_are_the_formula_s():
    """Two layers with the shapes of 7B; 1.6 GB if they were real."""
    pytest.importorskip("transformers")
    rows, length, width, inner, vocabulary = 1, 2048, 4096, 11008, 32000
    tokens = rows * length
    found = measure_model(
        lambda: llama_of(2, width, inner, 32, vocabulary),
        lambda: {"input_ids": torch.randint(vocabulary, (rows, length))},
        estimate="a100",
    )
    layer = 2 * tokens * (4 * width * width + 3 * width * inner) + 4 * rows * length**2 * width
    head = 2 * tokens * width * vocabulary
    assert found.forward_flops == pytest.approx((0, layer, layer, head), rel=0.02)
    backward = (0, 2 * layer, 2 * layer, 2 * head)
    assert found.backward_flops == pytest.approx(backward, rel=0.03)  # scores are computed again
    assert found.profile.layers[1].parameter_bytes == 4 * (
        4 * width**2 + 3 * width * inner + 2 * width
    )
    # All of it is arithmetic: nothing is faster than the part of the peak that is assumed.
    assert found.profile.layers[1].forward_ms >= layer / (19.5e9 * 0.8)
    assert found.is_estimate
    assert abs(found.difference) < 0.01


@pytest.mark.parametrize("kind", SAMPLES)
def test_estimates_agree_with_running(kind):
    """Without values, a model has the same layers, bytes and tied weights."""
    if kind in HUGGING_FACE:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    sample = SAMPLES[kind]()
    if kind == "mixtral":  # torch computes the shapes of grouped experts in this type only
        sample.model.to(torch.bfloat16)
    options = {"loss_fn": sample.loss_fn, "targets": sample.targets}
    run = measure_model(sample.model, sample.batch, repeats=1, **options).profile
    made = measure_model(sample.model, sample.batch, estimate="h100", **options)
    guess = made.profile
    assert guess.tied == run.tied
    assert (guess.microbatch_size, guess.input_bytes) == (run.microbatch_size, run.input_bytes)
    for mine, real in zip(guess.layers, run.layers, strict=True):
        assert mine.name == real.name
        assert mine.output_bytes == real.output_bytes
        assert mine.gradient_bytes == real.gradient_bytes
        assert mine.parameter_bytes == real.parameter_bytes
        # Fake tensors align some of attention's temporaries differently.
        assert mine.activation_bytes == pytest.approx(real.activation_bytes, rel=0.2)
        assert 0 <= mine.weight_grad_ms <= mine.backward_ms
    assert abs(made.difference) < 0.05
    assert all(isinstance(p, nn.Parameter) and not p.is_meta for p in sample.model.parameters())


def test_experts_count():
    """Each token goes through two experts of three matrices, and through the router."""
    pytest.importorskip("transformers")
    sample = SAMPLES["mixtral"]()
    sample.model.to(torch.bfloat16)
    found = measure_model(sample.model, sample.batch, estimate="h100")
    tokens, width, inner, experts, length = 40, 32, 64, 4, 10
    per_token = 3 * width**2 + experts * width + 2 * 3 * width * inner
    attention = 4 * tokens * length * width
    assert found.forward_flops[1] == pytest.approx(2 * tokens * per_token + attention, rel=0.02)
    assert found.backward_flops[1] == pytest.approx(2 * found.forward_flops[1], rel=0.03)


def test_convolutions_and_look_ups():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 64, 10))
    found = measure_model(model, torch.randn(2, 3, 8, 8), estimate="10,100")
    assert found.forward_flops == (2 * 2 * 64 * 8 * 27, 0, 2 * 2 * 512 * 10)
    rows, width = 16, 32
    look_up = nn.Sequential(nn.Embedding(1_000_000, width), nn.Linear(width, width))
    embedding = measure_model(look_up, torch.zeros(rows, dtype=torch.long), estimate="10,100")
    read_and_written = 2 * rows * width * 4
    assert embedding.profile.layers[0].forward_ms == pytest.approx(
        read_and_written / 100e6, abs=1e-6
    )


def test_devices_by_name_and_by_numbers():
    assert find_accelerator("A100").name == "A100"
    own = find_accelerator("100, 1000")
    assert own.time_ms(precision=Precision.BF16, flops=100e12, moved_bytes=0) == 1000
    assert own.time_ms(precision=Precision.FP32, flops=0, moved_bytes=1000e9) == pytest.approx(1000)
    for text in ("", "gtx", "1", "1,2,3", "0,1", "-1,2", "nan,1", "1e3,1"):
        with pytest.raises(InputError, match=r"estimate: .* is neither of v100, a100, h100"):
            find_accelerator(text)


def test_a_type_that_the_device_lacks_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    batch = torch.ones(2, 4, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="V100 does not compute in bf16"):
        measure_model(model, batch, estimate="v100")
    half = measure_model(model, batch, estimate="a100").profile
    assert half.layers[0].parameter_bytes == 2 * 20


def test_a_model_that_asks_for_values_is_refused_in_one_line():
    class Asking(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > 0 else x

    model = nn.Sequential(Asking(), nn.Linear(4, 4))
    with pytest.raises(InputError, match="needs the value of a tensor") as raised:
        measure_model(model, torch.ones(2, 4), estimate="a100")
    assert "\n" not in str(raised.value)
