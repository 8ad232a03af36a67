"""Numbers of the index, the scores and the lists as Triton's kernels take them: global names must be ``constexpr``."""

import triton.language as tl

from dynamicemb.optimizer import OptimizerKind
from dynamicemb.table import admission, index, scores
from dynamicemb.table.stepping import results
from dynamicemb.table.triton import missing

# Entries of the clock, and columns of the tallies.
NOW = tl.constexpr(index.NOW)
OLDEST = tl.constexpr(index.OLDEST)
SEEN = tl.constexpr(index.SEEN)
STEP = tl.constexpr(index.STEP)
INSERTED = tl.constexpr(index.INSERTED)
EVICTED = tl.constexpr(index.EVICTED)
FAILED = tl.constexpr(index.FAILED)
EXPIRED = tl.constexpr(index.EXPIRED)
NON_ADMITTED = tl.constexpr(index.NON_ADMITTED)
NUM_TALLIES = tl.constexpr(index.NUM_TALLIES)
ERASED = tl.constexpr(index.ERASED)
UPDATES = tl.constexpr(index.UPDATES)
CLAMPED = tl.constexpr(index.CLAMPED)
HITS = tl.constexpr(index.HITS)
MISSES = tl.constexpr(index.MISSES)

# Score strategies, and how tables count.
COUNT_ALL = tl.constexpr(scores.COUNT_ALL)
COUNT_SOME = tl.constexpr(scores.COUNT_SOME)
SCORE_LFU = tl.constexpr(scores.SCORE_LFU)
COUNT_NONE = tl.constexpr(scores.COUNT_NONE)
SCORE_NO_EVICTION = tl.constexpr(scores.SCORE_NO_EVICTION)
SCORE_MIXED = tl.constexpr(scores.SCORE_MIXED)
SCORE_STEP = tl.constexpr(scores.SCORE_STEP)
SCORE_TIMESTAMP = tl.constexpr(scores.SCORE_TIMESTAMP)

# The word of Philox that draws chances.
CHANCE_WORD = tl.constexpr(admission.CHANCE_WORD)

# Optimizers.
SGD = tl.constexpr(int(OptimizerKind.SGD))
ADAM = tl.constexpr(int(OptimizerKind.ADAM))
ADAGRAD = tl.constexpr(int(OptimizerKind.ADAGRAD))
ROWWISE_ADAGRAD = tl.constexpr(int(OptimizerKind.ROWWISE_ADAGRAD))

# Outcomes of inserts.
FAILED_OUTCOME = tl.constexpr(results.FAILED_OUTCOME)
INSERTED_OUTCOME = tl.constexpr(results.INSERTED_OUTCOME)
EVICTED_OUTCOME = tl.constexpr(results.EVICTED_OUTCOME)
EXPIRED_OUTCOME = tl.constexpr(results.EXPIRED_OUTCOME)

# Entries of the lists' lengths.
LEADERS_LENGTH = tl.constexpr(missing.LEADERS_LENGTH)
WORK_LENGTH = tl.constexpr(missing.WORK_LENGTH)
MISSING_LENGTH = tl.constexpr(missing.MISSING_LENGTH)
LOSERS_LENGTH = tl.constexpr(missing.LOSERS_LENGTH)
ARRIVED = tl.constexpr(missing.ARRIVED)
