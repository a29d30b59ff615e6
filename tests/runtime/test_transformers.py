"""Hugging Face models, split by interception, train as in one process."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.splitting import cut, lay_out  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.workers import run_ranks, share_from_first  # noqa: E402

VOCABULARY, LENGTH, ROWS = 64, 10, 8


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4,
        n_embd=32,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config)


def make_bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


MAKERS = {"gpt2": make_gpt2, "llama": make_llama, "bert": make_bert}


def loss_fn(output, targets):
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_data(num_steps):
    generator = torch.Generator().manual_seed(3)
    data = []
    for _ in range(num_steps):
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = mask[4, 5:] = 0  # padding: the mask has to reach every stage
        data.append(({"input_ids": ids, "attention_mask": mask}, ids.roll(-1, 1)))
    return data


def train(rank, kinds, cuts_and_replicas, num_steps):
    for kind in kinds:
        torch.manual_seed(0)
        model = MAKERS[kind]()
        names = lay_out(model).names
        data = make_data(num_steps)
        originals = copy.deepcopy(model)

        def alone(model=originals, data=data):
            optimizer = sgd(model.parameters())
            losses = []
            for batch, targets in data:
                optimizer.zero_grad()
                loss = loss_fn(model(**batch), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        expected = share_from_first(alone)
        for cuts, replicas in cuts_and_replicas:
            torch.manual_seed(0)
            plan = cut_plan(names, cuts, replicas, 2, ROWS // 2, num_devices=4)
            with Pipeline(plan, MAKERS[kind](), loss_fn, sgd) as pipeline:
                losses = [pipeline.step(*batch) for batch in data]
            assert losses == pytest.approx(expected, rel=1e-4), (kind, cuts)


def test_gpt2_llama_and_bert_in_two_and_four_stages():
    plans = [([0, 3], [2, 2]), ([0, 1, 3, 5], [1, 1, 1, 1])]
    run_ranks(4, train, list(MAKERS), plans, 3, timeout_s=200)


@pytest.mark.full
def test_more_cuts_and_steps():
    plans = [([0, 2], [1, 3]), ([0, 2, 4], [1, 2, 1]), ([0, 2, 3, 4], [1, 1, 1, 1])]
    run_ranks(4, train, list(MAKERS), plans, 20, timeout_s=400)


OWN_NAMES = {
    "gpt2": ("transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head"),
    "llama": ("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    "bert": ("bert.embeddings", "bert.encoder.layer", "cls"),
}
"""Modules as each model calls them, its list of four layers among them."""


@pytest.mark.parametrize("kind", list(MAKERS))
def test_layers_by_the_models_own_names(kind):
    torch.manual_seed(0)
    model = MAKERS[kind]().eval()
    names = []
    for name in OWN_NAMES[kind]:
        is_list = isinstance(model.get_submodule(name), nn.ModuleList)
        names += [f"{name}.{index}" for index in range(4)] if is_list else [name]
    first = names.index(next(name for name in names if name.endswith(".1")))
    stages = [range(first), range(first, first + 2), range(first + 2, len(names))]
    layout = lay_out(model, names, [layers.start for layers in stages])
    batch, _ = make_data(1)[0]
    value = None
    for layers in stages:
        value = cut(copy.deepcopy(model), layout, layers)(value, (), batch)
    assert torch.equal(value.logits, model(**batch).logits)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_what_collects_of_all_layers_is_refused(name):
    model = make_bert()
    batch, _ = make_data(1)[0]
    part = cut(model, lay_out(model), range(3, 6))
    with pytest.raises(RuntimeMismatchError, match=f"{name} collects something of each layer"):
        part(torch.randn(ROWS, LENGTH, 32), (), {**batch, name: True})
