"""How fast tables are dumped and loaded: ``python -m benchmarks.studies.dumps [--quick] [--folder F]``.

Against a plain write, fsync included, and a plain read of as many bytes in as many files, by one thread of each rank,
on the same disk, in turns. Before anything is read the page cache is told to forget it. A dump in the background is
also taken apart: the pause, in which rows are copied, against ``memcpy`` of as many bytes to memory that nobody has
touched yet and to memory that has been; and training steps while the rest is written against steps without.

Times are those of the slowest rank, medians of the rounds. Memory is the peak of a rank's resident pages above what it
had before its first dump and load (Linux only).
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.studies.markdown import markdown
from dynamicemb import DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.checkpoint import load as load_path
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode

_DIM = 64
# Weights and Adam's two moments, the id and its score.
_ROW_BYTES = 3 * 4 * _DIM + 16
_PIECE = 2**24
_MIB = 2**20


class Study:
    """One rank: its share of a table, and the folder that all ranks share."""

    def __init__(self, rank: int, world_size: int, num_bytes: int, folder: str):
        self.rank, self.world_size, self.folder = rank, world_size, Path(folder)
        self.num_rows = num_bytes // _ROW_BYTES // world_size
        self.module = self.make()
        for begin in range(0, self.num_rows, 65536):
            ids = self.ids(begin, min(self.num_rows, begin + 65536))
            self.module.insert("t", ids, torch.rand(ids.numel(), _DIM))
        self.batch = self.ids(0, min(4096, self.num_rows))

    def make(self) -> BatchedDynamicEmbeddingTablesV2:
        options = DynamicEmbTableOptions(dim=_DIM, max_capacity=self.num_rows * 5 // 4)
        pooling = DynamicEmbPoolingMode.NONE
        args: dict[str, Any] = {"table_names": ["t"], "pooling_mode": pooling, "device": "cpu", "optimizer": "adam"}
        return BatchedDynamicEmbeddingTablesV2([options], **args, seed=1)

    def ids(self, begin: int, end: int) -> torch.Tensor:
        """Return ids that this rank owns."""
        return torch.arange(begin, end) * self.world_size + self.rank

    def step(self) -> None:
        self.module(self.batch, torch.arange(self.batch.numel() + 1)).sum().backward()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long the slowest rank takes."""
        dist.barrier()
        begin = time.perf_counter()
        work()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took)

    def own_files(self, name: str) -> list[Path]:
        return sorted((self.folder / name).rglob(f"*.rank_{self.rank}.*"))

    def write_plainly(self, sizes: list[int]) -> None:
        data = memoryview(torch.randint(256, (_PIECE,), dtype=torch.uint8).numpy())
        for number, size in enumerate(sizes):
            file = os.open(self.folder / f"plain {self.rank} {number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            for begin in range(0, size, _PIECE):
                os.write(file, data[: min(_PIECE, size - begin)])
            os.fsync(file)
            os.close(file)

    def read_plainly(self, files: list[Path]) -> None:
        buffer = bytearray(_PIECE)
        for path in files:
            file = os.open(path, os.O_RDONLY)
            while os.readv(file, [buffer]):
                pass
            os.close(file)

    def remove(self, name: str) -> None:
        dist.barrier()
        for path in self.folder.glob(f"plain {self.rank} *"):
            path.unlink()
        if self.rank == 0:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        dist.barrier()


def forget(files: list[Path]) -> None:
    """Drop the cached pages of files that are on the disk."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def peak_above(work: Callable[[], object]) -> int:
    """Return by how many bytes the resident pages of this process rose above what they were before."""

    def resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def dump_round(study: Study) -> dict[str, float]:
    """Write plainly and dump, in the foreground and in the background."""
    found = {}
    # What malloc keeps of the first dump does not count for the next.
    found["memory of dump"] = peak_above(lambda: study.module.dump(study.folder / "dump", optim=True))
    sizes = [path.stat().st_size for path in study.own_files("dump")]
    found["bytes"] = float(sum(sizes))
    study.remove("dump")
    found["plain write"] = study.seconds(lambda: study.write_plainly(sizes))
    study.remove("plain")
    args: dict[str, Any] = {"optim": True}
    dump = study.module.dump
    found["dump"] = study.seconds(lambda: dump(study.folder / "dump", **args))
    study.remove("dump")
    found["memory of dump"] = peak_above(lambda: study.module.dump(study.folder / "dump", **args))
    study.remove("dump")
    handles = []
    begin = time.perf_counter()
    found["pause"] = study.seconds(
        lambda: handles.append(study.module.dump(study.folder / "dump", blocking=False, **args))
    )
    steps = []
    while not handles[0].done():
        started = time.perf_counter()
        study.step()
        steps.append(time.perf_counter() - started)
    handles[0].wait()
    found["dump in background"] = time.perf_counter() - begin
    found["step meanwhile"] = statistics.median(steps)
    alone = []
    for _ in range(20):
        started = time.perf_counter()
        study.step()
        alone.append(time.perf_counter() - started)
    found["step alone"] = statistics.median(alone)
    return found | copies(study, sum(sizes))


def copies(study: Study, num_bytes: int) -> dict[str, float]:
    """Time ``memcpy`` by the threads of each rank."""
    source = torch.ones(num_bytes // 8, dtype=torch.int64)
    warm = torch.ones_like(source)
    touched = study.seconds(lambda: warm.copy_(source))
    return {"memcpy to touched memory": touched, "memcpy to fresh memory": study.seconds(source.clone)}


def load_round(study: Study) -> dict[str, float]:
    """Read plainly and load what is in the folder, without the page cache."""
    found = {}
    found["memory of load"] = peak_above(lambda: study.module.load(study.folder / "dump", optim=True))
    files = study.own_files("dump")
    forget(files)
    found["plain read"] = study.seconds(lambda: study.read_plainly(files))
    verify = load_path.verify
    times: list[float] = []

    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        result = verify(*args)
        forget(files)
        times.append(time.perf_counter() - begin)
        return result

    load_path.verify = timed
    forget(files)
    try:
        found["load"] = study.seconds(lambda: study.module.load(study.folder / "dump", optim=True))
    finally:
        load_path.verify = verify
    took = torch.tensor(times[0])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    found["verification"] = float(took)
    found["load after it"] = found["load"] - float(took)
    return found


def run_rank(rank: int, world_size: int, args: argparse.Namespace, store: str, results: Any) -> None:
    """Measure as one of the ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    study = Study(rank, world_size, args.bytes, args.folder)
    rounds = []
    for _ in range(args.rounds + 1):
        found = dump_round(study) | load_round(study)
        study.remove("dump")
        rounds.append(found)
    # The first round compiles kernels, and the machine finds memory for the first time.
    if rank == 0:
        medians = {name: statistics.median(found[name] for found in rounds[1:]) for name in rounds[0]}
        results.put(medians | {name: rounds[0][name] for name in medians if name.startswith("memory")})
    dist.destroy_process_group()


def lines(found: dict[str, float]) -> list[list[str]]:
    """Return the table of one number of ranks."""
    size = found["bytes"]
    writes, reads = found["plain write"], found["plain read"]
    against = {
        "plain write": writes,
        "dump": writes,
        "dump in background": writes,
        "pause": found["memcpy to fresh memory"],
        "memcpy to fresh memory": found["memcpy to fresh memory"],
        "memcpy to touched memory": found["memcpy to fresh memory"],
        "plain read": reads,
        "verification": reads,
        "load after it": reads,
        "load": reads,
    }
    return [
        [name, f"{found[name]:.3f}", f"{size / found[name] / 1e9:.2f}", f"{base / found[name]:.0%}"]
        for name, base in against.items()
    ]


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tables, one round")
    parser.add_argument("--folder", help="where to write; a temporary folder if it is left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=2**30, help="of all ranks together")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.bytes = 1, 2**24
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            args.folder, above = folder, args.folder
            results = mp.get_context("spawn").SimpleQueue()
            store = os.path.join(folder, "store")
            mp.spawn(run_rank, (world_size, args, store, results), nprocs=world_size)
            found = results.get()
            args.folder = above
        header = ["", "s", "GB/s of a rank", "speed against the plain one"]
        print(markdown(f"{world_size} ranks, {found['bytes'] / 1e9:.2f} GB each", header, lines(found)))
        memory = {name: found[f"memory of {name}"] / _MIB for name in ("dump", "load")}
        print(f"memory above the tables: dump {memory['dump']:.0f} MiB, load {memory['load']:.0f} MiB")
        print(f"a step takes {1e3 * found['step alone']:.2f} ms, {1e3 * found['step meanwhile']:.2f} ms meanwhile\n")


if __name__ == "__main__":
    main()
