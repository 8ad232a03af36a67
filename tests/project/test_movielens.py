"""The MovieLens example: its data, its AUC, and a short run on two processes."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec", exc_type=ImportError)
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import movielens  # noqa: E402
import movielens_data as md  # noqa: E402
from movielens_model import auc  # noqa: E402
from movielens_run import choose_device  # noqa: E402

from tests.support.ranks import skip_without_gpus  # noqa: E402

try:
    FILES = md.read_files()
except FileNotFoundError as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module")
def ratings() -> md.Ratings:
    return md.load_ratings()


@pytest.fixture(scope="module")
def parts(ratings: md.Ratings) -> tuple[md.Ratings, md.Ratings]:
    return md.temporal_split(ratings)


def flat(ratings: md.Ratings, feature: str) -> np.ndarray:
    bag = ratings.bags[feature]
    return bag.values[bag.present()]


def test_counts_match_the_data_set(ratings: md.Ratings) -> None:
    assert [len(table) for table in FILES] == [100_000, 943, 1_682]
    assert len(ratings) == 100_000
    counts = {name: len(ratings.unique_ids(name)) for name in ("user", "item", "occupation", "gender", "zip", "genre")}
    assert counts == {"user": 943, "item": 1_682, "occupation": 21, "gender": 2, "zip": 795, "genre": 19}
    assert ratings.labels.sum() == (FILES[0]["rating"] >= 4).sum() == 55_375
    assert np.isfinite(ratings.dense).all()
    assert ratings.dense.shape == (100_000, md.NUM_DENSE)


def test_every_sample_keeps_its_user_item_rating_and_time(ratings: md.Ratings) -> None:
    table = FILES[0]
    columns = (ratings.bags["user"].values[:, 0], ratings.bags["item"].values[:, 0], ratings.timestamps)
    built = sorted(zip(*(column.tolist() for column in columns), (ratings.labels > 0.5).tolist()))
    wanted = zip(table["user_id"], table["movie_id"], table["timestamp"], table["rating"] >= 4)
    assert built == sorted(wanted)


def test_genre_bags_hold_the_flags_of_the_film(ratings: md.Ratings) -> None:
    items = FILES[2].set_index("movie_id").loc[:, md.FIRST_GENRE_COLUMN :]
    bag = ratings.bags["genre"]
    for sample in range(0, len(ratings), 997):
        flags = np.flatnonzero(items.loc[ratings.bags["item"].values[sample, 0]])
        assert bag.values[sample, : bag.lengths[sample]].tolist() == flags.tolist()
    assert bag.lengths.min() >= 1


def test_the_split_is_one_moment_in_time(ratings: md.Ratings, parts: tuple[md.Ratings, md.Ratings]) -> None:
    train, held_out = parts
    assert train.timestamps.max() < held_out.timestamps.min()
    assert len(train) + len(held_out) == len(ratings)
    assert (len(train), len(held_out)) == (79_999, 20_001)
    # Both classes on both sides, or the AUC would mean nothing.
    assert 0.4 < train.labels.mean() < 0.6
    assert 0.4 < held_out.labels.mean() < 0.6


def test_the_vocabulary_knows_only_the_train_part(parts: tuple[md.Ratings, md.Ratings]) -> None:
    train, held_out = parts
    vocabulary = md.Vocabulary(train)
    encoded_train, encoded_held_out = vocabulary.encode(train), vocabulary.encode(held_out)
    for feature in train.bags:
        known = set(train.unique_ids(feature).tolist())
        numbers = flat(encoded_train, feature)
        assert sorted(set(numbers.tolist())) == list(range(1, len(known) + 1)), feature
        assert vocabulary.size(feature) == len(known) + 1
        pairs = set(zip(flat(train, feature).tolist(), numbers.tolist()))
        assert len(pairs) == len(known), feature
        number_of = dict(pairs)
        wanted = [number_of.get(one, 0) for one in flat(held_out, feature).tolist()]
        assert flat(encoded_held_out, feature).tolist() == wanted, feature
    assert (flat(encoded_held_out, "user") == 0).mean() > 0.8


def test_ids_are_the_same_in_every_process(ratings: md.Ratings) -> None:
    again = md.load_ratings()
    for feature, bag in ratings.bags.items():
        assert np.array_equal(bag.values, again.bags[feature].values), feature
        assert np.array_equal(bag.lengths, again.bags[feature].lengths), feature
    # Literals, so that a hash with a seed of the process would be noticed.
    pandas = pytest.importorskip("pandas")
    assert md.hash_column("gender", pandas.Series(["F", "M", "F"])).tolist() == [
        -2500334917064130067,
        1620673282573638053,
        -2500334917064130067,
    ]
    assert md.cross("user_genre", np.array([196]), np.array([5])).tolist() == [-848495385432046343]


def test_crosses_are_64_bit_and_do_not_collide(ratings: md.Ratings) -> None:
    pairs = {("occupation", "item"), ("user", "genre"), ("gender", "genre")}
    for left, right in pairs:
        bag = ratings.bags[right]
        lefts = np.broadcast_to(ratings.bags[left].values, bag.values.shape)[bag.present()]
        distinct = len(set(zip(lefts.tolist(), flat(ratings, right).tolist())))
        ids = ratings.unique_ids(f"{left}_{right}")
        assert len(ids) == distinct
        assert (ids < 0).any()
        assert (np.abs(ids.astype(float)) > 2**48).mean() > 0.99


def test_the_order_and_the_field_of_a_cross_matter() -> None:
    one, two = np.array([1]), np.array([2])
    crosses = [md.cross("a", one, two), md.cross("a", two, one), md.cross("b", one, two)]
    assert len({int(ids[0]) for ids in crosses}) == 3


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [1, 63, 100, 128])
def test_evaluation_shows_every_sample_once(parts: tuple[md.Ratings, md.Ratings], world_size: int, num_samples: int):
    held_out = parts[1].take(np.arange(num_samples))
    shares = [list(md.batches(held_out, 32, rank, world_size)) for rank in range(world_size)]
    assert {len(share) for share in shares} == {-(-num_samples // 32)}
    assert {len(batch.labels) for share in shares for batch in share} == {32 // world_size}
    seen = torch.cat([batch.samples for share in shares for batch in share])
    assert sorted(seen[seen >= 0].tolist()) == list(range(num_samples))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_shows_a_sample_at_most_once(parts: tuple[md.Ratings, md.Ratings], world_size: int) -> None:
    train = parts[0].take(np.arange(1000))
    seen = [
        torch.cat(
            [batch.samples for rank in range(world_size) for batch in md.batches(train, 64, rank, world_size, seed)]
        )
        for seed in (0, 1)
    ]
    for samples in seen:
        assert len(samples) == len(set(samples.tolist())) == 1000 // 64 * 64
    assert seen[0].tolist() != seen[1].tolist()


def test_a_batch_holds_the_bags_of_its_samples(parts: tuple[md.Ratings, md.Ratings]) -> None:
    train = parts[0].take(np.arange(300))
    batch = next(md.batches(train, 64, 1, 2, seed=3))
    assert batch.ids.keys() == list(train.bags)
    for feature, bag in train.bags.items():
        jagged = batch.ids[feature].to_dense()
        for sample, ids in zip(batch.samples.tolist(), jagged, strict=True):
            assert ids.tolist() == bag.values[sample, : bag.lengths[sample]].tolist(), feature
    assert batch.labels.tolist() == train.labels[batch.samples.numpy()].tolist()


def test_processes_must_share_a_batch_evenly(parts: tuple[md.Ratings, md.Ratings]) -> None:
    with pytest.raises(ValueError, match="63 is not a multiple of the 2 processes"):
        next(md.batches(parts[0], 63, 0, 2))


def test_auc_of_the_docstring() -> None:
    assert auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])) == 0.875


@pytest.mark.parametrize("num_samples", [2, 63, 100, 2000])
@pytest.mark.parametrize("num_levels", [1, 3, 10**6])
def test_auc_equals_counting_pairs(num_samples: int, num_levels: int) -> None:
    generator = torch.Generator().manual_seed(num_samples + num_levels)
    scores = torch.randint(num_levels, (num_samples,), generator=generator).float()
    labels = torch.randint(2, (num_samples,), generator=generator).float()
    labels[:2] = torch.tensor([0.0, 1.0])
    differences = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    wanted = float(((differences > 0).double() + 0.5 * (differences == 0).double()).mean())
    assert auc(scores, labels) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_needs_both_classes(label: float) -> None:
    with pytest.raises(ValueError, match="AUC needs both classes"):
        auc(torch.rand(5), torch.full((5,), label))


def environment() -> dict[str, str]:
    """Return the environment of a run of the example on the CPU."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    variables["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    variables.pop("TRITON_INTERPRET", None)
    return variables


@pytest.mark.parametrize(
    ("words", "seeds", "fraction"),
    [
        ("", [0], 0.5),
        ("--capacity-fraction 0.25 --seeds 4,5", [4, 5], 0.25),
        ("--full-capacity", [0], 2.0),
        ("--compare", [0, 1, 2], 2.0),
        ("--static --device cuda", [0], 0.5),
    ],
)
def test_arguments(words: str, seeds: list[int], fraction: float) -> None:
    args = movielens.parse_arguments(words.split())
    assert (args.seeds, args.capacity_fraction) == (seeds, fraction)
    assert args.device == ("cuda" if "cuda" in words else None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--compare --capacity-fraction 0.5", "--capacity-fraction has no effect: --compare"),
        ("--static --capacity-fraction 0.5", "--capacity-fraction has no effect: --static"),
        ("--static --stats runs", "--stats has no effect: --static has no dynamic tables"),
        ("--capacity-fraction 0", "--capacity-fraction must be > 0, got 0.0"),
        ("--seeds 1,x", "--seeds: must be numbers with commas between them, got '1,x'"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
    ],
)
def test_arguments_without_sense_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        movielens.parse_arguments(words.split())
    assert message in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, movielens\ntry:\n movielens.main()\nexcept SystemExit:\n sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "share of all ids that the dynamic tables have rows for (default: 0.5)" in " ".join(done.stdout.split())
    assert "comma-separated (default: 0; with --compare 0,1,2)" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("num_gpus", "num_processes", "wanted", "chosen"),
    [
        (0, 1, None, "cpu"),
        (1, 1, None, "cuda"),
        (1, 2, None, "cpu"),
        (4, 2, None, "cuda"),
        (4, 2, "cpu", "cpu"),
        (2, 2, "cuda", "cuda"),
        (1, 2, "cuda", "--device cuda: 2 processes need a GPU each, torch sees 1; start fewer"),
        (0, 1, "cuda", "--device cuda: torch sees no CUDA device"),
    ],
)
def test_a_gpu_for_each_process_is_used(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_processes: int, wanted: str | None, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
    if chosen in ("cpu", "cuda"):
        assert choose_device(wanted) == chosen
    else:
        with pytest.raises(SystemExit, match=chosen):
            choose_device(wanted)


def test_a_missing_gpu_is_named() -> None:
    command = [sys.executable, str(EXAMPLES / "movielens.py"), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "--device cuda: torch sees no CUDA device")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_two_processes_learn(kind: str, tmp_path: Path) -> None:
    output = run_example(kind, 2, environment(), [] if kind == "static" else ["--stats", str(tmp_path)])
    if kind == "dynamic":
        assert output.startswith("compiling CPU kernels, once (up to 2 minutes)\n")
        check_stats(output)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["seed0-rank0", "seed0-rank1"]
        lines = (tmp_path / "seed0-rank1" / "bucket_loads.txt").read_text().splitlines()
        assert sorted(line.split(":")[0] for line in lines) == sorted(md.load_ratings().bags)


@pytest.mark.distributed
@pytest.mark.cuda
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_gpus_learn(kind: str, num_processes: int) -> None:
    skip_without_gpus(num_processes)
    variables = environment()
    del variables["CUDA_VISIBLE_DEVICES"]
    output = run_example(kind, num_processes, variables)
    if kind == "dynamic":
        assert output.startswith("compiling GPU kernels, once (up to 2 minutes)\n")
        check_stats(output)


def run_example(kind: str, num_processes: int, variables: dict[str, str], words: Sequence[str] = ()) -> str:
    """Train for one epoch; return what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command += [str(EXAMPLES / "movielens.py"), "--epochs", "1"]
    command += ["--static"] if kind == "static" else [*words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    # 0.67 is far above a constant (0.5) and below what either kind reaches in one pass.
    assert float(re.search(rf"^{kind}: AUC (0\.\d+)", done.stdout, re.MULTILINE).group(1)) > 0.67
    assert f"{kind}: AUC" in done.stdout and "(seed 0; " in done.stdout
    return done.stdout


def check_stats(output: str) -> None:
    assert "The tables have rows for 50% of all ids" in output.splitlines()[-1]
    rows = re.findall(r"│ (\w+) +│ +([\d,]+) │ +([\d,]+) │ +\d+% │ +[\d,]+ │ +([\d,]+) │ +([\d,]+) │", output)
    stats = {name: [int(value.replace(",", "")) for value in values] for name, *values in rows}
    ratings = md.load_ratings()
    assert set(stats) == set(ratings.bags)
    # Slots are rounded up for every rank, so it depends on their number which tables are too small for their ids.
    trained, _ = md.temporal_split(ratings)
    full = {name for name, (_, capacity, *_) in stats.items() if len(trained.unique_ids(name)) > 0.9 * capacity}
    assert {name for name, (_, _, evicted, _) in stats.items() if evicted} == full
    assert full >= {"item", "occupation_item", "user", "user_genre"}
    assert all(size <= capacity and failed == 0 for size, capacity, _, failed in stats.values())


def warm_start(num_processes: int, variables: dict[str, str]) -> None:
    """Move the model from static tables to dynamic ones; the losses of the steps after must agree."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command += [str(EXAMPLES / "warm_start.py"), "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=variables)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    largest = re.search(r"^largest difference of 20 steps: (\S+): ok$", done.stdout, re.MULTILINE)
    assert largest is not None and float(largest[1]) <= 1e-5
    # A model that forgot what the static one learned would be far from it in the first step already.
    first = re.search(r"│ 1 +│ (0\.\d+) │ (0\.\d+) │", done.stdout)
    assert first is not None and 0.3 < float(first[1]) < 0.6


@pytest.mark.distributed
def test_c13_a_warm_start_goes_on_as_the_static_tables_would() -> None:
    warm_start(2, environment())


@pytest.mark.distributed
@pytest.mark.cuda
def test_c13_a_warm_start_on_a_gpu() -> None:
    skip_without_gpus(1)
    variables = environment()
    del variables["CUDA_VISIBLE_DEVICES"]
    warm_start(1, variables)
