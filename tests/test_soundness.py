"""Trainings that cannot learn, under the watch: what is wrong and where; and right ones that look alike."""

import itertools
import math
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cpbkit.gpu_check.watch import watch

HERE = Path(__file__)
pytestmark = pytest.mark.long
X, Y = torch.randn(32, 8), torch.randn(32, 1)
STEPS = 2500  # at the least, and seconds: the watch looks at a part of the steps
SECONDS = 1.5


def steps(part=1, times=1):
    """Go on for a part of so many steps, and for so many seconds in all the times that it is called."""
    end = time.perf_counter() + SECONDS / times
    for i in itertools.count():
        if i >= STEPS // part and time.perf_counter() > end:
            return
        yield i


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def make():
    model = net()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def train(x=X, y=Y, zero=True, loss_of=nn.functional.mse_loss):
    model, optimizer = make()
    for _ in steps():
        if zero:
            optimizer.zero_grad()  # not reached
        loss_of(model(x), y).backward()  # train
        optimizer.step()


def not_finite():
    train(x=X.log())


def broadcast():
    train(y=Y[:, 0], loss_of=lambda forecast, y: (forecast - y).square().mean())  # compare


def inputs_not_scaled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    nn.init.normal_(model[2].weight, std=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.tensor((1e4 + 50 * X).tolist())  # raw
    for _ in steps():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(32) % 2).backward()
        optimizer.step()


def targets_not_scaled():
    model, optimizer = make()
    y = torch.tensor((1e7 + 1e6 * Y).tolist())  # dear
    for _ in steps():
        step(model, optimizer, y=y)


def targets_not_scaled_by_distance():
    model, optimizer = make()
    y = torch.tensor((5e5 + 1e5 * Y).tolist())  # costly
    for _ in steps():
        optimizer.zero_grad()
        nn.functional.l1_loss(model(X), y).backward()
        optimizer.step()


def scaled_late():
    model, optimizer = make()
    for _ in steps():
        step(model, optimizer, 300 * X, 500 + 100 * Y)  # large, and learned all the same


def a_loss_that_need_not_fall():
    model, optimizer = make()
    for _ in steps():
        optimizer.zero_grad()
        (model(300 * X) * 0 + torch.randn(32, 1).abs() * model(300 * X).sigmoid()).mean().backward()
        optimizer.step()


def remade():
    model = net()
    for _ in steps():
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # make
        step(model, optimizer)


def not_zeroed():
    train(zero=False)


class UsedUp:
    """An optimiser whose own list of weights is empty once torch's has gone through it."""

    def __init__(self, weights):
        self.weights, self.inner = weights, torch.optim.SGD(weights, lr=10.0)

    def clear(self):
        for weight in self.weights:
            weight.grad = None

    def zero_grad(self):
        self.clear()


def zeroed_by_a_list_that_is_used_up():
    model = net()
    optimizer = UsedUp(model.parameters())
    for _ in steps():
        optimizer.zero_grad()  # used up
        nn.functional.mse_loss(model(X), Y).backward()
        optimizer.inner.step()


def towers(zeroed):
    towers = nn.Linear(8, 16), nn.Linear(8, 16)
    optimizers = [torch.optim.Adam(tower.parameters()) for tower in towers]
    for _ in steps():
        for optimizer in optimizers[:zeroed]:
            optimizer.zero_grad()  # only one
        likeness = towers[0](X) @ towers[1](X + 0.1 * torch.randn_like(X)).mT
        nn.functional.cross_entropy(likeness, torch.arange(32)).backward()
        for optimizer in optimizers:
            optimizer.step()


def one_of_two_never_zeroed():
    towers(zeroed=1)


def two_zeroed():
    towers(zeroed=2)


def softmax_over_one_output():
    model = nn.Sequential(net(), nn.Softmax(1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps():
        optimizer.zero_grad()
        forecast = model(X)  # of one
        nn.functional.binary_cross_entropy(forecast, (Y > 0).float()).backward()
        optimizer.step()


def frozen_but_for_a_scale(held=True):
    model, scale = net(), nn.Parameter(torch.zeros(()))
    if held:
        model.requires_grad_(False)  # frozen
    optimizer = torch.optim.Adam([*model.parameters(), scale])
    for _ in steps():
        optimizer.zero_grad()
        (torch.exp(-scale) * nn.functional.mse_loss(model(X), Y) + scale).backward()
        optimizer.step()


def a_scale_of_the_loss():
    frozen_but_for_a_scale(held=False)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = net(), net()

    @torch.no_grad()  # decorated
    def policy(self, x):
        return self.actor(x)

    def value(self, x):
        return self.policy(x) + self.critic(x)


def a_policy_without_gradients():
    model = Agent()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps():
        optimizer.zero_grad()
        advantage = Y - model.critic(X).detach()
        nn.functional.mse_loss(model.value(X), advantage).backward()
        optimizer.step()


def a_rate_of_zero():
    model, optimizer = make()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 10**6)  # warm-up
    for _ in steps():
        step(model, optimizer)
        schedule.step()


def a_first_epoch_at_a_rate_of_zero():
    model, optimizer = make()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 400))
    for _ in steps():
        step(model, optimizer)
        schedule.step()


def put_back(model, kept):
    with torch.no_grad():
        for weight, before in zip(model.parameters(), kept, strict=True):
            weight.copy_(before)  # put back


def undone(after=math.inf):
    model, optimizer = make()
    kept = [weight.detach().clone() for weight in model.parameters()]
    for i in steps():
        step(model, optimizer)
        if i < after:
            put_back(model, kept)


def undone_once():
    undone(after=1)


def a_body_that_waits_with_an_optimiser_of_its_own():
    torch.manual_seed(0)
    body, head = nn.Linear(8, 64), nn.Linear(64, 1)
    body.requires_grad_(False)  # for the first epochs
    optimizers = [torch.optim.Adam(part.parameters()) for part in (body, head)]
    for _ in steps(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(head(body(X).relu()), Y).backward()
        for optimizer in optimizers:
            optimizer.step()


def make_blind(generator):
    with torch.no_grad():  # blind
        return generator(X)


def a_generator_without_gradients(make=make_blind):
    torch.manual_seed(0)
    generator, critic = nn.Linear(8, 8), net()
    first, second = (torch.optim.Adam(model.parameters()) for model in (critic, generator))
    for _ in steps(2):
        first.zero_grad()
        nn.functional.mse_loss(critic(X), Y).backward()
        first.step()
        second.zero_grad()
        critic(make(generator)).square().mean().backward()
        second.step()


def a_generator_with_gradients():
    a_generator_without_gradients(make=lambda generator: generator(X))


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).detach())  # cut


def without_gradient():
    model = Cut()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in steps():
        step(model, optimizer)


def in_eval_mode():
    model, optimizer = make()
    for _epoch in range(10):
        for _ in steps(8, times=10):
            step(model, optimizer, X.repeat(30, 1), Y.repeat(30, 1))
        model.eval()  # eval


def rate_gone():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in steps():
        step(model, optimizer)
        scheduler.step()  # rate


def fit(optimizer=torch.optim.Adam, before=lambda model: None, after=lambda model, optimizer: None):
    model = net()  # the line that makes the optimiser may be asked for: there is no other
    before(model)
    optimizer = optimizer(model.parameters())
    for _ in steps():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()  # fit
        after(model, optimizer)
        optimizer.step()


def zeroed_too_soon():
    model, optimizer = make()
    for _ in steps():
        nn.functional.mse_loss(model(X), Y).backward()
        optimizer.zero_grad()  # zeroed
        optimizer.step()


def never_above_zero():
    fit(before=lambda model: nn.init.constant_(model[0].bias, -100.0))


def clipped_to_nothing():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)  # still
    for _ in steps():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def decayed():
    fit(lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=10.0))  # decay


def too_high_a_rate():
    fit(lambda weights: torch.optim.Adam(weights, lr=1000.0))  # too high


def wrapped_anew():
    model, optimizer = make()
    for _ in steps():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss = torch.tensor(loss.item(), requires_grad=True)  # wrapped
        loss.backward()
        optimizer.step()


SORTED = TensorDataset(torch.randn(800, 8), torch.arange(800) // 200)


def in_order(shuffle=False):
    model = Classes(nn.Identity())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(SORTED, 32, shuffle=shuffle)
    held = DataLoader(SORTED, 200)  # held
    for _ in range(100):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            for x, _ in held:
                model(x)


class Folders(IterableDataset):
    def __iter__(self):
        for label in range(8):
            for _ in range(400):
                yield torch.randn(8), label  # class by class


def learn_classes(batches):
    model = nn.Linear(8, 10)
    optimizer = torch.optim.Adam(model.parameters())
    for _, (x, y) in zip(steps(), itertools.chain.from_iterable(batches), strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def in_order_from_a_stream():
    learn_classes(DataLoader(Folders(), 32) for _ in itertools.count())


def of_a_rare_class():
    learn_classes([(X, (torch.rand(32) < 0.01).long())] for _ in itertools.count())


def of_some_samples_of_each_class():
    learn_classes([(X[:30], torch.arange(10).repeat_interleave(3))] for _ in itertools.count())


LABELS = torch.randint(0, 4, (32,))


class Classes(nn.Module):
    def __init__(self, squash, outputs=4):
        super().__init__()
        self.layers, self.squash = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, outputs)), squash

    def forward(self, x):
        return self.squash(self.layers(x))


def classify(squash, loss_of, y=LABELS, outputs=4):
    model = Classes(squash, outputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in steps():
        optimizer.zero_grad()
        loss_of(model(X), y).backward()  # classify
        optimizer.step()


def softmax_twice():
    classify(nn.Softmax(dim=1), nn.CrossEntropyLoss())  # twice


def sigmoid_twice():
    sigmoid = nn.Sigmoid()  # sigmoid
    classify(sigmoid, nn.BCEWithLogitsLoss(), (Y > 0).float(), 1)


def softmax_over_the_batch():
    classify(lambda x: torch.softmax(x, dim=0), nn.CrossEntropyLoss())  # over the batch


def without_logarithms():
    classify(lambda x: x, nn.NLLLoss())


def one_class():
    classify(lambda x: x, nn.CrossEntropyLoss(), torch.zeros_like(LABELS), 1)


def of_an_earlier_model():
    optimizer = torch.optim.SGD(nn.Linear(8, 1).parameters(), lr=0.01)  # of another
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    for _ in steps():
        step(model, optimizer)


def never_stepped():
    model, optimizer = make()
    for _ in steps():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        optimizer.step  # noqa: B018 # not called


def maximised():
    model, optimizer = make()
    for _ in steps():
        optimizer.zero_grad()
        loss = -nn.functional.mse_loss(model(X), Y)  # minus
        loss.backward()
        optimizer.step()


def of_equal_outputs():
    def fill(model):
        for weight in model.parameters():
            nn.init.constant_(weight, 0.1)  # constant

    fit(before=fill)


def a_momentum_of_one():
    fit(lambda weights: torch.optim.SGD(weights, lr=1e-5, momentum=1.0))  # momentum


class Anew(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 64)

    def forward(self, x):
        return nn.Linear(64, 1)(torch.relu(self.layer(x)))  # anew


def a_layer_made_anew():
    model = Anew()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in steps():
        step(model, optimizer)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8) for _ in range(3)]  # listed
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def layers_in_a_list():
    model = Listed()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps():
        step(model, optimizer)


def of_another_sample(apart=True):
    torch.manual_seed(0)
    x = torch.randn(640, 8)
    y = 3 * x[:, :1]
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, targets = (DataLoader(data, 64, shuffle=True) for data in (x, y))
    both = DataLoader(TensorDataset(x, y), 64, shuffle=True)
    for _ in steps(20):
        for a, b in zip(inputs, targets, strict=True) if apart else both:  # zipped
            step(model, optimizer, a, b)


def with_a_new_head(freeze):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # too early
    model.requires_grad_(not freeze)
    model[2] = nn.Linear(64, 1)
    for _ in steps():
        step(model, optimizer)


def with_a_new_head_on_a_frozen_body():
    with_a_new_head(freeze=True)


def with_a_new_head_on_a_body_that_learns():
    with_a_new_head(freeze=False)


class Experts(nn.Module):
    """Of two parts one is never asked, and the body in front, which gets gradients, is left as it is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 64)
        self.asked, self.other = nn.Linear(64, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.asked(self.body(x).relu())


def an_expert_that_is_not_asked():
    model = Experts()
    optimizer = torch.optim.Adam([*model.asked.parameters(), *model.other.parameters()])
    for _ in steps():
        step(model, optimizer)


WRONG = {
    with_a_new_head_on_a_frozen_body: ("REPLACED", "# too early"),
    with_a_new_head_on_a_body_that_learns: ("REPLACED", "# too early"),
    layers_in_a_list: ("UNREGISTERED", "# listed"),
    of_another_sample: ("UNPAIRED", "# zipped"),
    never_stepped: ("NOT_STEPPED", "# not called"),
    maximised: ("MAXIMISED", "# minus"),
    of_equal_outputs: ("ALIKE", "# constant"),
    a_momentum_of_one: ("MOMENTUM", "# momentum"),
    a_layer_made_anew: ("MADE_ANEW", "# anew"),
    of_an_earlier_model: ("OTHER_WEIGHTS", "# of another"),
    zeroed_too_soon: ("ZEROED_TOO_SOON", "# zeroed"),
    never_above_zero: ("ZERO_GRADIENTS", "# fit"),
    clipped_to_nothing: ("STANDS_STILL", "# still"),
    decayed: ("DECAY", "# decay"),
    too_high_a_rate: ("RATE_TOO_HIGH", "# too high"),
    wrapped_anew: ("NO_GRADIENT", "# wrapped"),
    in_order_from_a_stream: ("SORTED", "# class by class"),
    in_order: ("SORTED", "loader = DataLoader(SORTED, 32, shuffle=shuffle)"),
    softmax_twice: ("PROBABILITIES", "# twice"),
    sigmoid_twice: ("PROBABILITIES", "# sigmoid"),
    softmax_over_the_batch: ("PROBABILITIES", "# over the batch"),
    without_logarithms: ("NO_LOGARITHMS", "# classify"),
    one_class: ("ONE_CLASS", "# classify"),
    not_finite: ("LOSS_NOT_FINITE", "# train"),
    broadcast: ("BROADCAST", "# compare"),
    inputs_not_scaled: ("INPUTS_NOT_SCALED", "# raw"),
    targets_not_scaled: ("TARGETS_NOT_SCALED", "# dear"),
    targets_not_scaled_by_distance: ("TARGETS_NOT_SCALED", "# costly"),
    remade: ("OPTIMIZER_REMADE", "# make"),
    not_zeroed: ("NOT_ZEROED", "# not reached"),
    one_of_two_never_zeroed: ("NOT_ZEROED", "# only one"),
    zeroed_by_a_list_that_is_used_up: ("NOT_ZEROED", "# used up"),
    a_rate_of_zero: ("RATE_ZERO", "# warm-up"),
    undone: ("UNDONE", "# put back"),
    a_generator_without_gradients: ("NO_GRADIENT", "# blind"),
    softmax_over_one_output: ("ONE_OUTPUT", "# of one"),
    frozen_but_for_a_scale: ("FROZEN", "# frozen"),
    a_policy_without_gradients: ("NO_GRADIENT", "# decorated"),
    without_gradient: ("NO_GRADIENT", "# cut"),
    in_eval_mode: ("EVAL_MODE", "# eval"),
    rate_gone: ("RATE_GONE", "# rate"),
}


@pytest.mark.parametrize("loop", WRONG, ids=lambda loop: loop.__name__)
def test_what_keeps_a_training_from_learning_is_named_with_its_line(loop):
    reason, mark = WRONG[loop]
    line = next(i for i, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(mark))
    with watch(tell=False, live=False) as w:
        loop()
    assert (w.diagnosis.verdict, w.diagnosis.reason) == ("UNSOUND_TRAINING", reason), w.report()
    assert re.search(rf"{HERE.name}:{line}\b", w.diagnosis.text) and w.diagnosis.fixes[0].note, w.diagnosis.text


def gradients_that_are_added_up():
    model, optimizer = make()
    for i in steps():
        (nn.functional.mse_loss(model(X), Y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def logits_where_a_probability_was():
    """The memory of a probability that is gone holds numbers that may lie between 0 and 1 as well."""
    critic = nn.Linear(8, 1)
    nn.init.zeros_(critic.weight)
    nn.init.constant_(critic.bias, 0.5)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-6)
    for _ in steps():
        optimizer.zero_grad()
        torch.sigmoid(Y)
        nn.functional.binary_cross_entropy_with_logits(critic(X), torch.sigmoid(Y)).backward()
        optimizer.step()


def a_search_begun_anew_for_each_problem():
    model = net()
    for _ in steps():
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X), Y)
            loss.backward()
            return loss

        optimizer.step(closure)


class AddedUp(nn.Module):
    """A bag of words whose positions, zero at first, get the same gradient each."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 1)
        self.positions = nn.Parameter(torch.zeros(12, 16))

    def forward(self, ids):
        return self.head((self.words(ids) + self.positions).sum(1))


def positions_that_are_added_up():
    model, ids = AddedUp(), torch.randint(50, (32, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in steps():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(ids), Y).backward()
        optimizer.step()


def two_optimisers():
    maker, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    ours, theirs = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
    for _ in steps(2):
        theirs.zero_grad()
        critic(maker(torch.randn(32, 4)).detach()).mean().backward()
        theirs.step()
        ours.zero_grad()
        critic(maker(torch.randn(32, 4))).mean().neg().backward()
        ours.step()


def phases_of_one_loop():
    model, optimizer = make()
    for phase in ["train", "val"] * 4:
        model.train(phase == "train")
        for _ in steps(4, times=8):
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                loss = nn.functional.mse_loss(model(X), Y)
            if phase == "train":
                loss.backward()
                optimizer.step()


def a_cosine():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        step(model, optimizer)
        scheduler.step()


def a_frozen_part():
    model, _ = make()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in steps():
        step(model, optimizer)


def a_loss_of_pairs():
    model, optimizer = make()
    for _ in steps():
        optimizer.zero_grad()
        found = model(X)
        (found[:, None, 0] - found[None, :, 0] - (Y - Y.T)).square().mean().backward()
        optimizer.step()


def a_student_after_its_teacher():
    teacher, optimizer = make()
    for _ in steps(2):
        step(teacher, optimizer)
    teacher.eval()
    student, optimizer = make()
    for _ in steps(2):
        with torch.no_grad():
            target = teacher(X)
        step(student, optimizer, X, target)


def attention_and_logits():
    def attend(x):
        return torch.softmax(x @ x.T, dim=1) @ x

    classify(attend, nn.CrossEntropyLoss())


def logits_that_are_probabilities_of_nothing():
    classify(torch.sigmoid, nn.BCELoss(), nn.functional.one_hot(LABELS, 4).float())
    classify(nn.LogSoftmax(dim=1), nn.NLLLoss())
    classify(torch.relu, nn.CrossEntropyLoss())


def of_the_same_sample():
    of_another_sample(apart=False)


def noise_in_a_loader_made_anew():
    model, optimizer = make()
    data = TensorDataset(torch.randn(60_000, 8), torch.randn(60_000, 1))
    for _ in range(2):
        for x, y in DataLoader(data, 32, shuffle=True):
            step(model, optimizer, x, y)


def noise_in_a_loader_whose_workers_persist():
    model, optimizer = make()
    data = TensorDataset(torch.randn(20_000, 8), torch.randn(20_000, 1))
    loader = DataLoader(data, 64, shuffle=True, num_workers=1, persistent_workers=True)
    for _ in range(3):
        for x, y in loader:
            step(model, optimizer, x, y)


def gains_times_a_difference():
    model, optimizer = make()
    for _ in steps():
        optimizer.zero_grad()
        ((model(300 * X) - 500.0) * torch.randn(32, 1)).mean().backward()
        optimizer.step()


def a_generator_that_maximises():
    (model, optimizer), (critic, other) = make(), make()
    critic = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    other = torch.optim.SGD(critic.parameters(), lr=0.01)
    for _ in steps(2):
        for sign, of in ((-1, optimizer), (1, other)):
            of.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(critic(model(X)), torch.zeros(len(X), 1))
            (loss if sign > 0 else -loss).backward()
            of.step()


def weights_moved_by_hand():
    model = net()
    for _ in steps():
        model.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.01 * weight.grad


def a_scale_that_begins_at_one():
    model = nn.Sequential(net(), nn.Linear(1, 16))
    nn.init.ones_(model[1].weight)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps():
        step(model, optimizer, y=torch.cat([Y] * 16, 1) * torch.arange(16))


def a_policy():
    gain = torch.randn(32, 1)
    classify(nn.LogSoftmax(dim=1), lambda logs, y: nn.functional.nll_loss(logs * gain, y))


def a_teachers_probabilities():
    target = torch.softmax(torch.randn(32, 4), dim=1)
    classify(nn.LogSoftmax(dim=1), lambda logs, _: nn.functional.kl_div(logs, target, reduction="batchmean"))
    classify(nn.Identity(), lambda logits, _: nn.functional.cross_entropy(logits, target))


def shuffled_with_a_sorted_validation():
    in_order(shuffle=True)


def a_last_layer_that_begins_at_zero():
    fit(before=lambda model: nn.init.zeros_(model[2].weight))


def a_slow_start():
    rate = 0.0

    def warm_up(_, optimizer):
        nonlocal rate
        rate += 1e-6
        optimizer.param_groups[0]["lr"] = rate

    fit(lambda weights: torch.optim.AdamW(weights, lr=1e-6, weight_decay=0.1), after=warm_up)
    fit(lambda weights: torch.optim.Adam(weights, lr=0.05))


def an_input_that_is_learned():
    """As an adversarial image: the optimiser holds no weight of the model that runs."""
    model, _ = make()
    model.requires_grad_(False)
    x = nn.Parameter(torch.randn(32, 8))
    optimizer = torch.optim.Adam([x], lr=1e-3)
    for _ in steps():
        step(model, optimizer, x)


RIGHT = [
    a_first_epoch_at_a_rate_of_zero,
    a_body_that_waits_with_an_optimiser_of_its_own,
    undone_once,
    a_generator_with_gradients,
    a_scale_of_the_loss,
    an_expert_that_is_not_asked,
    an_input_that_is_learned,
    shuffled_with_a_sorted_validation,
    a_last_layer_that_begins_at_zero,
    a_slow_start,
    attention_and_logits,
    logits_that_are_probabilities_of_nothing,
    a_policy,
    a_teachers_probabilities,
    a_student_after_its_teacher,
    gradients_that_are_added_up,
    two_optimisers,
    logits_where_a_probability_was,
    phases_of_one_loop,
    a_cosine,
    scaled_late,
    a_loss_that_need_not_fall,
    a_search_begun_anew_for_each_problem,
    positions_that_are_added_up,
    a_frozen_part,
    a_generator_that_maximises,
    of_the_same_sample,
    noise_in_a_loader_made_anew,
    noise_in_a_loader_whose_workers_persist,
    gains_times_a_difference,
    weights_moved_by_hand,
    a_scale_that_begins_at_one,
    a_loss_of_pairs,
    two_zeroed,
    of_a_rare_class,
    of_some_samples_of_each_class,
    train,
]


@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_a_right_training_that_looks_alike_is_left_in_peace(loop):
    with watch(tell=False, live=False) as w:
        loop()
    assert "UNSOUND_TRAINING" not in w.report().replace("-", "_")
