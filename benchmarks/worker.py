"""Our engine of one case in a process of its own, with the package of a given checkout; see ``against.py``.

Runs as a file, so that ``dynamicemb`` comes from ``PYTHONPATH`` and ``benchmarks`` from where this file lies. Reads a
line with the number of a turn, and answers with a line of JSON: the times of its steps.
"""

import json
import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Read what to build from the first line, then answer turns until the input ends."""
    # What others print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Files beside this one are modules of a package, not modules of their own.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    import dynamicemb

    sys.path.insert(0, str(_ROOT))
    import torch

    from benchmarks.cases import select
    from benchmarks.kinds import alone
    from benchmarks.turns import Effort

    asked = json.loads(sys.stdin.readline())
    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
    (case,) = select([asked["case"]], asked["device"])
    with alone(case.shrink(asked["max_rows"], asked["max_ids"]), Effort(**asked["effort"])) as turn:
        print(json.dumps({"package": str(dynamicemb.__file__)}), file=answers, flush=True)
        for line in sys.stdin:
            times = [[sample.ms, sample.cpu_ms, sample.quiet] for sample in turn(int(line))]
            print(json.dumps(times), file=answers, flush=True)


if __name__ == "__main__":
    main()
