"""The models' totals against published figures, and the rules for time, memory and cuts."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from pipeplan import zoo
from pipeplan.errors import InputError
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.zoo import multimodal, transformers, vision
from pipeplan.zoo.hardware import ACCELERATORS, MEMORY_EFFICIENCY, Precision

NAMES = [
    "vgg19",
    "resnet152",
    "inception-v3",
    "transformer-big",
    "bert-large",
    "bert-48",
    "xlnet-large",
    "gpt2-xl",
    "llama-7b",
    "llama-70b",
    "mixtral-8x7b",
    "llava-7b",
]
VISION = ("vgg19", "resnet152", "inception-v3")

PUBLISHED_PARAMETERS = {
    "vgg19": 143_667_240,  # torchvision
    "resnet152": 60_192_808,  # torchvision
    "inception-v3": 27_161_264,  # torchvision, with the auxiliary classifier
    "transformer-big": 213e6,  # the paper, table 3
    "bert-large": 340e6,  # the paper
    "bert-48": 640e6,  # DAPPLE
    "xlnet-large": 360_268_800,  # Hugging Face, without the head's bias
    "gpt2-xl": 1_557_611_200,  # Hugging Face
    "llama-7b": 6_738_415_616,  # Hugging Face, Llama-2-7b
    "llama-70b": 68_976_648_192,  # Hugging Face, Llama-2-70b
    "mixtral-8x7b": 46_702_792_704,  # Hugging Face, Mixtral-8x7B-v0.1
    "llava-7b": 7.06e9,  # Hugging Face, llava-1.5-7b
}

PUBLISHED_MULTIPLY_ADDS = {"vgg19": 19.63e9, "resnet152": 11.51e9, "inception-v3": 5.71e9}


def layer(profile: ModelProfile, name: str) -> LayerProfile:
    return next(each for each in profile.layers if each.name == name)


def total(profile: ModelProfile, field: str) -> float:
    return sum(getattr(each, field) for each in profile.layers)


def test_the_names_are_frozen_and_are_what_the_catalogue_has() -> None:
    recipes = {**vision.RECIPES, **transformers.RECIPES, **multimodal.RECIPES}
    assert list(zoo.MODEL_NAMES) == NAMES == list(recipes)
    assert set(PUBLISHED_PARAMETERS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_match_the_published_total(name: str) -> None:
    parameters = zoo.model_figures(name).parameters
    assert parameters == pytest.approx(PUBLISHED_PARAMETERS[name], rel=0.02)


@pytest.mark.parametrize(
    "name",
    ["vgg19", "resnet152", "inception-v3", "gpt2-xl", "llama-7b", "llama-70b", "mixtral-8x7b"],
)
def test_parameters_match_exactly_where_the_weights_are_published(name: str) -> None:
    assert zoo.model_figures(name).parameters == PUBLISHED_PARAMETERS[name]


def test_xlnet_differs_from_the_published_weights_by_the_bias_of_its_head() -> None:
    bias = 32_000
    assert zoo.model_figures("xlnet-large").parameters == 360_268_800 + bias


def test_bert_matches_the_published_weights_with_both_heads() -> None:
    body_and_pooler = 335_141_888  # Hugging Face, bert-large-uncased
    word_head = 1024 * 1024 + 1024 + 2 * 1024 + 30_522
    sentence_head = 2 * 1024 + 2
    expected = body_and_pooler + word_head + sentence_head
    assert zoo.model_figures("bert-large").parameters == expected


def test_inception_without_its_auxiliary_classifier() -> None:
    without = zoo.model_figures("inception-v3").parameters - (
        768 * 128 + 2 * 128 + 128 * 768 * 25 + 2 * 768 + 768 * 1000 + 1000
    )
    assert without == pytest.approx(23.83e6, rel=0.001)


def test_mixtral_active_parameters() -> None:
    inactive = 32 * (8 - 2) * 3 * 4096 * 14_336
    active = zoo.model_figures("mixtral-8x7b").parameters - inactive
    assert active == pytest.approx(12.9e9, rel=0.01)


def test_the_vision_encoder_of_llava() -> None:
    profile = zoo.model("llava-7b")
    vision_bytes = sum(
        each.parameter_bytes for each in profile.layers if each.name.startswith("vision.")
    )
    unused_norm = 2 * 1024
    assert vision_bytes / 2 == 303_507_456 - unused_norm  # Hugging Face, clip-vit-large-patch14-336


@pytest.mark.parametrize("name", VISION)
def test_flops_match_the_published_multiply_adds(name: str) -> None:
    flops = zoo.model_figures(name).forward_flops
    assert flops == pytest.approx(2 * PUBLISHED_MULTIPLY_ADDS[name], rel=0.02)


# Two FLOPs for every parameter that multiplies a token, and 4 * width * tokens^2 for each layer's
# attention. The parameters are the published totals without the tables that are only looked up in;
# a tied table counts, because the head multiplies with it.
CLOSED_FORM = {
    "bert-large": (335.14e6 - 0.53e6, 24, 1024, 512),
    "bert-48": (640e6 - 0.53e6, 48, 1024, 512),
    "gpt2-xl": (1557.61e6 - 1.64e6, 48, 1600, 1024),
    "llama-7b": (6738.4e6 - 131.1e6, 32, 4096, 4096),
    "llama-70b": (68976.6e6 - 262.1e6, 80, 8192, 4096),
    "mixtral-8x7b": (12.88e9 - 131.1e6, 32, 4096, 4096),
}


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_flops_match_the_closed_form(name: str) -> None:
    parameters, num_layers, width, tokens = CLOSED_FORM[name]
    expected = 2 * parameters * tokens + 4 * num_layers * width * tokens**2
    figures = zoo.model_figures(name)
    assert figures.sequence_length == tokens
    assert figures.forward_flops == pytest.approx(expected, rel=0.02)


def test_flops_of_transformer_big() -> None:
    # Source and target have as many tokens; six self-attentions each, six across.
    tokens, width = 128, 1024
    expected = 2 * 213e6 * tokens + 18 * 4 * width * tokens**2
    assert zoo.model_figures("transformer-big").forward_flops == pytest.approx(expected, rel=0.02)


def test_flops_of_xlnet() -> None:
    # Each layer also projects 2 * tokens positions, once more than the parameters say, and
    # multiplies queries with them: twice the work of the plain score matrix.
    tokens, width, num_layers = 512, 1024, 24
    parameters = 2 * 360.3e6 * tokens
    positions = num_layers * (2 * tokens * width**2 + 4 * width * tokens**2)
    expected = parameters + positions + num_layers * 4 * width * tokens**2
    assert zoo.model_figures("xlnet-large").forward_flops == pytest.approx(expected, rel=0.02)


def test_flops_of_llava() -> None:
    decoder = 2 * (6738.4e6 - 131.1e6) * 2048 + 4 * 32 * 4096 * 2048**2
    encoder = 2 * 303.5e6 * 577 + 4 * 24 * 1024 * 577**2
    projector = 2 * 20.98e6 * 576
    expected = decoder + encoder + projector
    assert zoo.model_figures("llava-7b").forward_flops == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_every_default_profile_is_whole(name: str) -> None:
    profile, figures = zoo.model(name), zoo.model_figures(name)
    element_bytes = 4 if figures.precision == "fp32" else 2
    assert profile.name == name
    assert profile.microbatch_size == figures.microbatch_size
    assert profile.num_layers == figures.num_layers
    assert total(profile, "parameter_bytes") == figures.parameters * element_bytes
    assert profile.input_bytes > 0
    for each in profile.layers:
        assert each.forward_ms > 0
        assert each.backward_ms == pytest.approx(2 * each.forward_ms)
        assert each.weight_grad_ms is not None
        assert 0 <= each.weight_grad_ms <= each.backward_ms * (1 + 1e-12)
        assert each.gradient_bytes <= each.output_bytes
        assert each.activation_bytes > 0


@pytest.mark.parametrize("name", NAMES)
def test_no_device_is_faster_than_its_peak(name: str) -> None:
    profile, figures = zoo.model(name), zoo.model_figures(name)
    accelerator = ACCELERATORS[figures.device]
    precision = Precision(figures.precision)
    reachable = accelerator.peak_tflops[precision] * accelerator.arithmetic_efficiency[precision]
    arithmetic_ms = figures.forward_flops * profile.microbatch_size / reachable / 1e9
    assert arithmetic_ms < total(profile, "forward_ms") < 3 * arithmetic_ms


def test_a_convolution_is_bound_by_arithmetic_and_a_pooling_by_memory() -> None:
    profile = zoo.model("vgg19")
    outputs = 32 * 64 * 224 * 224
    multiply_adds = outputs * 64 * 9
    relu_ms = 2 * outputs * 4 / (900e6 * MEMORY_EFFICIENCY)
    expected_ms = 2 * multiply_adds / (15.7e9 * 0.8) + relu_ms
    assert layer(profile, "conv1_2").forward_ms == pytest.approx(expected_ms)
    pooled_ms = (outputs + outputs / 4) * 4 / (900e6 * MEMORY_EFFICIENCY)
    assert layer(profile, "pool1").forward_ms == pytest.approx(pooled_ms)
    assert layer(profile, "pool1").weight_grad_ms == 0


def test_a_larger_microbatch_costs_more_but_reads_the_weights_once() -> None:
    one, eight = (zoo.model("vgg19", microbatch_size=size) for size in (1, 8))
    assert layer(eight, "conv3_2").output_bytes == 8 * layer(one, "conv3_2").output_bytes
    assert layer(eight, "conv3_2").activation_bytes == 8 * layer(one, "conv3_2").activation_bytes
    assert total(eight, "parameter_bytes") == total(one, "parameter_bytes")
    # fc6 has 103 million weights: at one sample reading them is all that matters.
    assert layer(eight, "fc6").forward_ms < 1.1 * layer(one, "fc6").forward_ms
    assert layer(eight, "conv3_2").forward_ms > 7 * layer(one, "conv3_2").forward_ms


@pytest.mark.parametrize("name", NAMES)
def test_a_newer_device_and_half_precision_are_faster(name: str) -> None:
    times = [
        total(zoo.model(name, device=device, precision=precision), "forward_ms")
        for device, precision in (
            ("V100", "fp32"),
            ("A100", "fp32"),
            ("A100", "bf16"),
            ("H100", "bf16"),
        )
    ]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)


def test_a_transformer_layer_keeps_what_korthikanti_et_al_count() -> None:
    # Their s, b, h, a: 34 sbh + 5 as^2b bytes in half precision.
    s, b, h, a = 1024, 3, 1600, 25
    profile = zoo.model("gpt2-xl", microbatch_size=b, precision="fp16")
    assert layer(profile, "decoder.7").activation_bytes == 34 * s * b * h + 5 * a * s**2 * b


def test_flash_attention_keeps_nothing_quadratic() -> None:
    short, long = (zoo.model("llama-7b", sequence_length=tokens) for tokens in (1024, 4096))
    kept = layer(short, "decoder.0").activation_bytes
    assert layer(long, "decoder.0").activation_bytes == 4 * kept


def test_optimizer_state_follows_the_precision() -> None:
    # Bytes per parameter in all: 16 both ways.
    for precision, parameter_bytes in (("fp32", 4), ("fp16", 2)):
        profile = zoo.model("bert-large", precision=precision)
        assert parameter_bytes * (1 + profile.optimizer_bytes_per_parameter_byte) == 16


def test_what_crosses_the_cuts_of_transformer_big() -> None:
    profile = zoo.model("transformer-big", microbatch_size=2, sequence_length=100)
    states, target_ids = 2 * 100 * 1024 * 4, 2 * 100 * 8
    crossing = {each.name: (each.output_bytes, each.gradient_bytes) for each in profile.layers}
    assert crossing["embed.source"] == (states + target_ids, states)
    assert crossing["encoder.5"] == (states + target_ids, states)
    assert crossing["embed.target"] == crossing["decoder.4"] == (2 * states, 2 * states)
    assert crossing["decoder.5"] == (states, states)
    assert profile.input_bytes == 2 * target_ids


def test_what_crosses_the_cuts_of_llava() -> None:
    profile = zoo.model("llava-7b", sequence_length=1000)
    text_ids = (1000 - 576) * 8
    assert layer(profile, "vision.3").output_bytes == 577 * 1024 * 2 + text_ids
    assert layer(profile, "vision.3").gradient_bytes == 577 * 1024 * 2
    assert layer(profile, "projector").output_bytes == 576 * 4096 * 2 + text_ids
    assert layer(profile, "embed").output_bytes == 1000 * 4096 * 2
    assert layer(profile, "decoder.3").output_bytes == 1000 * 4096 * 2
    assert profile.input_bytes == 3 * 336 * 336 * 2 + text_ids


def test_one_tensor_crosses_the_cuts_of_the_vision_models() -> None:
    resnet, inception = zoo.model("resnet152"), zoo.model("inception-v3")
    assert layer(resnet, "conv1").output_bytes == 16 * 64 * 56 * 56 * 4
    assert layer(resnet, "conv4_36").output_bytes == 16 * 1024 * 14 * 14 * 4
    assert layer(inception, "mixed5d").output_bytes == 32 * 288 * 35 * 35 * 4
    assert layer(inception, "mixed6e").output_bytes == 32 * 768 * 17 * 17 * 4
    assert layer(inception, "mixed7c").output_bytes == 32 * 2048 * 8 * 8 * 4


def test_a_bottleneck_keeps_each_tensor_once() -> None:
    profile = zoo.model("resnet152", microbatch_size=1)
    # The block's input, then of the two inner convolutions output and normed output, then the last
    # convolution's output.
    wide, narrow = 1024 * 14 * 14, 256 * 14 * 14
    assert layer(profile, "conv4_5").activation_bytes == (wide + 2 * narrow + 2 * narrow + wide) * 4


def test_a_tied_head_owns_no_matrix_but_computes_with_it() -> None:
    profile = zoo.model("gpt2-xl")
    assert layer(profile, "head").parameter_bytes == 2 * 1600 * 2  # the last norm
    assert layer(profile, "head").forward_ms > layer(profile, "decoder.0").forward_ms
    untied = zoo.model("llama-7b")
    assert layer(untied, "head").parameter_bytes == (32_000 * 4096 + 4096) * 2


def test_a_name_says_what_differs_from_the_defaults() -> None:
    assert zoo.model("bert-large", microbatch_size=4, sequence_length=512).name == "bert-large"
    other = zoo.model(
        "bert-large", device="H100", precision="bf16", microbatch_size=8, sequence_length=128
    )
    assert other.name == "bert-large, H100, bf16, microbatch 8, sequence 128"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_these_figures(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    figures = zoo.model_figures(name)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == str(figures.num_layers)
    assert cells[2] == f"{figures.parameters / 1e6:,.1f}"
    assert cells[4] == f"{figures.forward_flops / 1e9:,.1f}"
    assert cells[5:8] == [
        str(figures.microbatch_size),
        str(figures.sequence_length or "-"),
        f"{figures.device} {figures.precision}",
    ]
    assert cells[8] == figures.source


def test_figures_are_frozen() -> None:
    figures = zoo.model_figures("vgg19")
    with pytest.raises(FrozenInstanceError):
        figures.name = "vgg16"  # type: ignore[misc]


@pytest.mark.parametrize("function", [zoo.model, zoo.model_figures])
def test_an_unknown_model_is_refused_with_the_nearest_and_all_names(function) -> None:
    with pytest.raises(InputError) as caught:
        function("bert-larg")
    message = str(caught.value)
    assert "'bert-larg'" in message
    assert "did you mean 'bert-large'?" in message
    assert ", ".join(NAMES) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("vgg19", {"device": "v100"}, "device: 'v100' is not known; did you mean 'V100'?"),
        ("vgg19", {"device": "TPU"}, "V100, A100, H100"),
        ("vgg19", {"device": ""}, "device: '' is not known"),
        ("vgg19", {"precision": "fp8"}, "fp32, fp16, bf16"),
        ("vgg19", {"precision": "bf16"}, "precision: V100 has no bf16; choose one of fp32, fp16"),
        ("vgg19", {"microbatch_size": 0}, "microbatch_size: 0 is not an integer of at least 1"),
        ("vgg19", {"microbatch_size": 1.5}, "microbatch_size: 1.5 is not"),
        ("vgg19", {"microbatch_size": True}, "microbatch_size: True is not"),
        ("resnet152", {"sequence_length": 128}, "128 does not apply to resnet152"),
        ("gpt2-xl", {"sequence_length": 0}, "0 is not an integer of at least 1 and at most 1024"),
        ("gpt2-xl", {"sequence_length": 1025}, "1025 is not an integer of at least 1"),
        ("bert-48", {"sequence_length": 513}, "at most 512"),
        ("llama-7b", {"sequence_length": "4k"}, "'4k' is not an integer"),
        ("llava-7b", {"sequence_length": 576}, "576 is not an integer of at least 577"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(name: str, setting: dict, said: str) -> None:
    with pytest.raises(InputError) as caught:
        zoo.model(name, **setting)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_door_opens_without_loading_the_descriptions() -> None:
    code = (
        "import sys; from pipeplan import zoo; zoo.MODEL_NAMES;"
        " print([name for name in sys.modules if name.startswith('pipeplan.zoo.')])"
    )
    path = [sys.executable, "-c", code]
    done = subprocess.run(path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_door_has_what_it_promises_and_nothing_else() -> None:
    for name in zoo.__all__:
        assert getattr(zoo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'modell'"):
        zoo.modell  # noqa: B018
