"""Random plans, groups, schedules and accumulation: resumed runs are the run that never stopped."""

import copy
import random
import tempfile

import pytest

torch = pytest.importorskip("torch")

from torch.optim import lr_scheduler  # noqa: E402

from pipeplan.runtime import Pipeline  # noqa: E402
from runtime.samples import make_case, random_plan  # noqa: E402
from runtime.workers import run_ranks, share_from_first  # noqa: E402

NUM_RANKS = 4
# Large epsilons, since small ones would blow up the rounding of gradients that are zero.
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, eps=1e-3),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01, eps=1e-3),
}
SCHEDULES = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer,
        0.02,
        total_steps=20,
        cycle_momentum=not {"momentum", "betas"}.isdisjoint(optimizer.defaults),
    ),
}


class Case:
    """One random run, the same on every rank."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.model, names, self.loss_fn, self.make_batch = make_case(rng.choice(["mlp", "tied"]))
        self.model.double()
        self.plans = [random_plan(rng, names, NUM_RANKS) for _ in range(3)]
        self.optimizer_fn = OPTIMIZERS[rng.choice(list(OPTIMIZERS))]
        self.schedule = SCHEDULES[rng.choice(list(SCHEDULES))]
        self.clip_norm = rng.choice([None, 0.5])
        self.has_groups = rng.random() < 0.7
        self.updates = [rng.random() < 0.6 for _ in range(9)]
        for last in (2, 5, 8):  # saved there
            self.updates[last] = True
        self.is_late = rng.random() < 0.5

    def batch(self, number, plan):
        rows = plan.model.microbatch_size * plan.microbatches
        inputs, targets = self.make_batch(torch.Generator().manual_seed(number), rows)
        as_double = [t.double() if t.is_floating_point() else t for t in (inputs, targets)]
        return tuple(as_double)

    def options(self, name, parameter):
        return {"weight_decay": 0.1} if parameter.ndim > 1 else {"lr": 0.02, "weight_decay": 0.0}

    def alone(self):
        model = copy.deepcopy(self.model)
        split = {}
        for name, parameter in model.named_parameters():
            options = self.options(name, parameter) if self.has_groups else {}
            split.setdefault(str(options), {"params": [], **options})["params"].append(parameter)
        optimizer = self.optimizer_fn(list(split.values()))
        scheduler = self.schedule(optimizer)
        waiting = []
        for number, update in enumerate(self.updates):
            waiting.append(self.batch(number, self.plans[number // 3]))
            if update:
                inputs, targets = (torch.cat(parts) for parts in zip(*waiting, strict=True))
                waiting = []
                optimizer.zero_grad()
                self.loss_fn(model(inputs), targets).backward()
                if self.clip_norm:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
                optimizer.step()
                scheduler.step()
        return model.state_dict(), scheduler.get_last_lr()

    def resumed(self, folder):
        for part, plan in enumerate(self.plans):
            with Pipeline(
                plan,
                copy.deepcopy(self.model),
                self.loss_fn,
                self.optimizer_fn,
                clip_norm=self.clip_norm,
                param_groups_fn=self.options if self.has_groups else None,
            ) as pipeline:
                if part and self.is_late:
                    assert pipeline.load(folder)
                scheduler = self.schedule(pipeline.optimizer)
                pipeline.track(scheduler=scheduler)
                if part and not self.is_late:
                    assert pipeline.load(folder)
                for number in range(3 * part, 3 * part + 3):
                    pipeline.step(*self.batch(number, plan), update=self.updates[number])
                    if self.updates[number]:
                        scheduler.step()
                assert pipeline.num_batches == 3 * part + 3
                pipeline.save(folder)
                state = pipeline.full_state_dict()
        return state, scheduler.get_last_lr()


def play(rank, seeds):
    for seed in seeds:
        case = Case(seed)
        folder = share_from_first(lambda: tempfile.mkdtemp(prefix="pipeplan-test-"))
        state, rates = case.resumed(folder)
        expected, expected_rates = share_from_first(case.alone)
        assert rates == pytest.approx(expected_rates, rel=1e-12), seed
        for name, value in expected.items() if rank == 0 else ():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-9), (seed, name)


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_random_resumptions(seeds):
    run_ranks(NUM_RANKS, play, seeds, timeout_s=60 + 20 * len(seeds))
