"""Copies of the module, other processes and threads, and the global switches of torch."""

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.utils.checkpoint import checkpoint

from dynamicemb import DynamicEmbScoreStrategy as Score
from tests.support.lookups import (
    OPTIMIZERS,
    assert_unchanged,
    bag_per_id,
    batch,
    contents,
    make_module,
    options,
    row_of,
    snapshot,
)


def trained(optimizer: str = "adam", dtype: torch.dtype = torch.float32):
    tables = [options(d, 32, embedding_dtype=dtype, score_strategy=Score.STEP, protect_steps=1) for d in (5, 3)]
    module = make_module(tables, optimizer=optimizer, learning_rate=0.125, feature_table_map=[0, 1, 1])
    for step in range(3):
        train(module, step)
    return module


def train(module, step: int) -> None:
    output = module(*batch(range(step, step + 9), [1, 1], range(5 * step, 5 * step + 20)))
    output.square().sum().backward()


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def queued(module):
    # As to a process that runs already: memory of tensors is shared, not copied.
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(module)
    return queue.get()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": saved,
    "queue": queued,
    "sequential": lambda module: copy.deepcopy(nn.Sequential(module))[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_holds_the_same_and_trains_on_its_own(how: str, dtype: torch.dtype) -> None:
    module = trained(dtype=dtype)
    waiting = module(*batch([1], [2], []))
    twin = COPIES[how](module)
    assert contents(twin) == contents(module) and twin.get_score() == module.get_score()
    assert twin.stats() == module.stats() and repr(twin) == repr(module)
    assert twin.tables.steps.num_outstanding == 0
    assert not {c.data_ptr() for c in twin.tables.store.chunks} & {c.data_ptr() for c in module.tables.store.chunks}
    before = snapshot(twin)
    waiting.sum().backward()
    train(module, 7)
    assert_unchanged(twin, before)
    before = snapshot(module)
    train(twin, 3)
    assert_unchanged(module, before)
    # Both go on as one that was never copied.
    reference, again = trained(dtype=dtype), COPIES[how](trained(dtype=dtype))
    for step in range(3, 8):
        train(reference, step)
        train(again, step)
    assert contents(reference) == contents(again)
    again.tables.check_invariants()


def test_a_copy_of_a_fresh_or_evaluating_module_works() -> None:
    twin = copy.deepcopy(make_module().eval())
    assert not twin(*bag_per_id([1])).any()
    twin.train()(*bag_per_id([1])).sum().backward()
    assert twin.stats()["a"]["size"] == 1


def test_moving_to_where_it_is_changes_nothing() -> None:
    module = nn.Sequential(trained())
    before = snapshot(module[0])
    module.to("cpu").float().cpu().to(torch.float32).to("cpu:0").requires_grad_(True)
    module.zero_grad(set_to_none=False)
    assert_unchanged(module[0], before)
    train(module[0], 3)


def send_and_train(queue, module) -> None:
    torch.set_num_threads(1)
    for step in range(3, 6):
        train(module, step)
    queue.put({name: {key: score for key, (score, _) in ids.items()} for name, ids in contents(module).items()})


def test_a_module_sent_to_another_process_is_a_copy() -> None:
    module = trained()
    before = snapshot(module)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=send_and_train, args=(queue, module))
    process.start()
    got = queue.get(timeout=120)
    process.join(60)
    assert process.exitcode == 0
    assert_unchanged(module, before)
    reference = trained()
    for step in range(3, 6):
        train(module, step)
        train(reference, step)
    assert contents(module) == contents(reference)
    assert got == {name: {key: score for key, (score, _) in ids.items()} for name, ids in contents(module).items()}


def run_two_threads(modules, steps: int = 30) -> None:
    errors = []

    def work(module) -> None:
        try:
            for step in range(steps):
                train(module, step % 5)
                module.export_keys_values("a", "cpu")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2])
def test_two_threads_train_two_modules_as_one_thread_does(optimizer: str) -> None:
    modules, reference = [trained(optimizer), trained(optimizer)], trained(optimizer)
    run_two_threads(modules)
    for step in range(30):
        train(reference, step % 5)
    assert contents(modules[0]) == contents(modules[1]) == contents(reference)


@pytest.mark.parametrize(
    "ask",
    [
        lambda module: module.contains("a", torch.tensor([1])),
        lambda module: module.stats(),
        lambda module: module.stats(wait=False),
        lambda module: module.bucket_loads("a"),
        lambda module: module.set_score({"a": 5}),
    ],
    ids=["contains", "stats", "stats without waiting", "bucket_loads", "set_score"],
)
def test_c19_who_asks_waits_for_another_thread_that_grows_or_inserts(ask) -> None:
    module = make_module([options(score_strategy=Score.CUSTOMIZED)])
    module.set_score({"a": 3})
    ask(module)
    module.set_score({"a": 4})
    thread = threading.Thread(target=ask, args=(module,))
    # As a lookup does from its first kernel to the last: index and rows do not belong together meanwhile.
    with module.tables.turn():
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()


# Global switches


def test_a_module_made_in_inference_mode_trains() -> None:
    with torch.inference_mode():
        module = make_module(optimizer="adam")
        ids, offsets = bag_per_id([1, 2])
        assert not module(ids, offsets).requires_grad
    before = row_of(module, "a", 1)[0]
    module(ids, offsets).sum().backward()
    assert not torch.equal(row_of(module, "a", 1)[0], before) and module.tables.steps.num_outstanding == 0


def test_a_module_made_under_the_meta_device_lives_on_its_own_device() -> None:
    with torch.device("meta"):
        module = make_module()
        other = make_module(device="cpu:0")
    for made in (module, other):
        made(*bag_per_id([1])).sum().backward()
        assert made.tables.index.keys.device.type == "cpu" and row_of(made, "a", 1)[0].isfinite().all()


def test_default_dtype_double_changes_no_row_and_no_export() -> None:
    reference = trained()
    torch.set_default_dtype(torch.float64)
    try:
        module = trained()
        ids, rows = module.export_keys_values("a", "cpu")
        assert rows.dtype is torch.float32 and ids.dtype is torch.int64
        assert module.eval()(*batch([1], [], [])).dtype is torch.float32
        assert module._empty_tensor.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    train(reference, 3), train(module.train(), 3)
    assert contents(module) == contents(reference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_trains_once_and_leaves_no_step(reentrant: bool) -> None:
    module, head = make_module(), nn.Linear(4, 1)
    anchor = torch.zeros(1, requires_grad=True)

    def run(ids, offsets, anchor):
        return head(module(ids, offsets)) + anchor

    output = checkpoint(run, *bag_per_id([1, 2]), anchor, use_reentrant=reentrant)
    before = row_of(module, "a", 1)[0]
    output.sum().backward()
    torch.testing.assert_close(row_of(module, "a", 1)[0], before - head.weight[0].detach(), rtol=0, atol=1e-6)
    del output
    assert module.tables.steps.num_outstanding == 0
