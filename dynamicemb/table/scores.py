"""Score strategies as kernels know them, and what a new table's score value is."""

SCORE_TIMESTAMP = 0
SCORE_STEP = 1
SCORE_CUSTOMIZED = 2
SCORE_LFU = 3

MAX_SCORE = 2**63 - 1
