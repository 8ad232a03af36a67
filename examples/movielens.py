"""Train a ranking model on MovieLens-100k with dynamic tables (raw 64-bit ids) or static ones (a vocabulary).

    torchrun --nproc_per_node 2 examples/movielens.py                  # dynamic, tables smaller than the id space
    torchrun --nproc_per_node 2 examples/movielens.py --full-capacity  # dynamic, room for every id
    torchrun --nproc_per_node 2 examples/movielens.py --static         # TorchRec's own tables
    torchrun --nproc_per_node 2 examples/movielens.py --compare        # both, three seeds, mean AUC
    torchrun --nproc_per_node 2 examples/movielens.py --stats runs     # hits, evictions, bucket loads into a folder

It runs on GPUs where there is one for each process, and else on the CPU (--device decides otherwise).

One moment in time divides train and held-out part. 85 % of the held-out ratings come from users that joined later, so
the AUC mostly measures what was learned about films, attributes and their crosses; the AUC on the users that the train
part knows is printed beside it.
"""

import argparse
import sys
from pathlib import Path

# Rows per distinct id, unless --capacity-fraction says otherwise.
CAPACITY_FRACTION = 0.5
# A bucket of 128 slots overflows practically never when half of all slots are used.
FULL_CAPACITY = 2.0


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ranking on MovieLens-100k", allow_abbrev=False)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--static", action="store_true", help="TorchRec's static tables over a vocabulary")
    kind.add_argument("--compare", action="store_true", help="static tables, then dynamic ones of full capacity")
    capacity = parser.add_mutually_exclusive_group()
    capacity.add_argument(
        "--capacity-fraction",
        type=float,
        help=f"share of all ids that the dynamic tables have rows for (default: {CAPACITY_FRACTION})",
    )
    capacity.add_argument("--full-capacity", action="store_true", help="room for every id")
    parser.add_argument("--seeds", type=_numbers, help="comma-separated (default: 0; with --compare 0,1,2)")
    for name, default, text in (
        ("--epochs", 2, "passes over the train part"),
        ("--batch-size", 512, "samples of all processes together"),
        ("--dim", 16, "columns of every table"),
        ("--table-rate", 0.05, "learning rate of row-wise Adagrad"),
        ("--eps", 3e-3, "eps of row-wise Adagrad"),
        ("--dense-rate", 1e-3, "learning rate of Adam"),
    ):
        parser.add_argument(name, type=type(default), default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU for each process, else cpu"
    )
    parser.add_argument(
        "--stats", type=Path, metavar="FOLDER", help="write what the tables do there, for TensorBoard or as JSON lines"
    )
    args = parser.parse_args(words)
    if args.stats is not None and args.static:
        parser.error("--stats has no effect: --static has no dynamic tables")
    if args.capacity_fraction is not None and (args.compare or args.static):
        reason = "compares at full capacity" if args.compare else "has no dynamic tables"
        parser.error(f"--capacity-fraction has no effect: {'--compare' if args.compare else '--static'} {reason}")
    if args.capacity_fraction is None:
        args.capacity_fraction = FULL_CAPACITY if args.full_capacity or args.compare else CAPACITY_FRACTION
    if args.capacity_fraction <= 0:
        parser.error(f"--capacity-fraction must be > 0, got {args.capacity_fraction}")
    args.seeds = args.seeds or ([0, 1, 2] if args.compare else [0])
    return args


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None


def main() -> int:
    args = parse_arguments()
    # After the arguments: it imports torch, which takes seconds that --help need not wait for.
    from movielens_run import run_all

    return run_all(args)


if __name__ == "__main__":
    sys.exit(main())
