"""Initial values on the host: table keys, validation of the arguments, and packing for kernels.

The first value of an id is a pure function of (seed, table name, id, column); ``docs/random.md`` is the specification.
Everything that needs a transcendental function or an argument check once per table happens here, in float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynamicemb.dynamicemb_config import DEBUG_EMB_INITIALIZER_MOD
from dynamicemb.table.layout import fmix64
from dynamicemb.types import DEFAULT_LOWER, DEFAULT_UPPER, DynamicEmbInitializerArgs, DynamicEmbInitializerMode

NORMAL = 0
TRUNCATED_NORMAL = 1
UNIFORM = 2
CONSTANT = 3
DEBUG = 4
NUM_PARAMS = 6
DEBUG_MODULUS = DEBUG_EMB_INITIALIZER_MOD

# With this much probability between the bounds, p = cdf_lower + cdf_width * u is a normal float64 for every u.
_MIN_PROBABILITY = 1e-290
_MASK64 = 0xFFFFFFFFFFFFFFFF


def fnv1a64(name: str) -> int:
    """Hash the UTF-8 bytes of a name with FNV-1a (Fowler, Noll, Vo), 64 bits.

    Example:
        ``fnv1a64("") == 0xCBF29CE484222325`` and ``fnv1a64("a") == 0xAF63DC4C8601EC8C``.
    """
    h = 0xCBF29CE484222325
    for byte in name.encode("utf-8"):
        h = ((h ^ byte) * 0x100000001B3) & _MASK64
    return h


def table_key(seed: int, name: str) -> int:
    """Return the 64-bit Philox key of a table: ``fmix64(seed ^ fnv1a64(name))``.

    Args:
        seed: any integer; its low 64 bits count, so -1 and 2**64 - 1 are the same seed.
        name: the table's name.

    Returns:
        An integer in ``[0, 2**64)``; the low 32 bits are key word 0.
    """
    mixed = (seed & _MASK64) ^ fnv1a64(name)
    return int(fmix64(np.array([mixed], dtype=np.uint64))[0])


@dataclass(frozen=True)
class InitializerTable:
    """What kernels need to know about the initializers of a group's tables.

    Attributes:
        modes: i32 ``[T]``: NORMAL 0, TRUNCATED_NORMAL 1, UNIFORM 2, CONSTANT 3, DEBUG 4.
        params: f64 ``[T, 6]``, unused entries 0::

            NORMAL            mean, std
            TRUNCATED_NORMAL  mean, signed std, cdf_lower, cdf_width, lower, upper
            UNIFORM           lower, range                  (both exact fp32 values)
            CONSTANT          value                         (an exact fp32 value)
            DEBUG             none

        keys: i64 ``[T]``, the bit patterns of the tables' 64-bit Philox keys.
        mode_mask: which modes there are, bit m for mode m; 0 if the host does not know.
    """

    modes: torch.Tensor
    params: torch.Tensor
    keys: torch.Tensor
    mode_mask: int = 0

    @classmethod
    def create(
        cls, args: Sequence[DynamicEmbInitializerArgs], names: Sequence[str], seed: int, device: torch.device | str
    ) -> "InitializerTable":
        """Validate and pack the initializers of a group's tables.

        Args:
            args: one per table. Missing bounds mean 0 and 1; the arguments are not changed.
            names: the tables' names, unique over the whole model.
            seed: the model's seed; its low 64 bits count.
            device: where the tensors go.

        Raises:
            TypeError: an initializer argument has the wrong type.
            ValueError: not one name per initializer, an argument that ``DynamicEmbInitializerArgs.validate`` refuses, a
                uniform range that is not finite in fp32, or a truncated normal whose interval holds no probability.
        """
        if len(args) != len(names):
            raise ValueError(f"names: {len(names)} names for {len(args)} initializers; give one name per table")
        packed = [_pack(arg, name) for arg, name in zip(args, names, strict=True)]
        keys = np.array([table_key(seed, name) for name in names], dtype=np.uint64).view(np.int64)
        return cls(
            modes=torch.tensor([mode for mode, _ in packed], dtype=torch.int32, device=device),
            params=torch.tensor([p for _, p in packed], dtype=torch.float64, device=device).view(-1, NUM_PARAMS),
            keys=torch.from_numpy(keys).to(device),
            mode_mask=sum(1 << mode for mode in {mode for mode, _ in packed}),
        )


def _pack(args: DynamicEmbInitializerArgs, name: str) -> tuple[int, list[float]]:
    """Return the mode and the six parameters of one table."""
    try:
        # Again, for the fields may have been assigned since.
        args.validate()
        code, pack = _PACKERS[args.mode]
        params = pack(args)
    except (TypeError, ValueError) as error:
        raise type(error)(f"initializer of table {name!r}: {error}") from error
    return code, params + [0.0] * (NUM_PARAMS - len(params))


def _bounds(args: DynamicEmbInitializerArgs) -> tuple[float, float]:
    """Return the bounds in float64."""
    lower = DEFAULT_LOWER if args.lower is None else float(args.lower)
    upper = DEFAULT_UPPER if args.upper is None else float(args.upper)
    if lower > upper:
        raise ValueError(f"lower = {lower} is above upper = {upper}; give both bounds")
    return lower, upper


def _pack_normal(args: DynamicEmbInitializerArgs) -> list[float]:
    return [float(args.mean), float(args.std_dev)]


def _pack_uniform(args: DynamicEmbInitializerArgs) -> list[float]:
    lower, upper = (np.float32(bound) for bound in _bounds(args))
    # Rounded once, here: then lower <= lower + range * u <= upper holds for every u in spite of rounding.
    with np.errstate(over="ignore"):
        span = float(upper - lower)
    if not math.isfinite(span):
        raise ValueError(f"upper - lower = {float(upper) - float(lower)} is not finite in float32; narrow the interval")
    return [float(lower), span]


def _pack_constant(args: DynamicEmbInitializerArgs) -> list[float]:
    return [float(np.float32(args.value))]


def _pack_debug(args: DynamicEmbInitializerArgs) -> list[float]:
    return []


def _normal_cdf(z: float) -> float:
    """Return the standard normal distribution function, accurate to a relative 1e-12 in the lower tail."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def _pack_truncated_normal(args: DynamicEmbInitializerArgs) -> list[float]:
    """Return mean, signed std, cdf_lower, cdf_width, lower, upper.

    An interval whose centre is above the mean is mirrored at the mean (negative std): near p = 0 float64 resolves the
    tail, near p = 1 it does not.
    """
    mean, std = float(args.mean), float(args.std_dev)
    lower, upper = _bounds(args)
    z_lower, z_upper = (lower - mean) / std, (upper - mean) / std
    if z_lower + z_upper > 0.0:
        z_lower, z_upper, std = -z_upper, -z_lower, -std
    cdf_lower = _normal_cdf(z_lower)
    width = _normal_cdf(z_upper) - cdf_lower
    if not width >= _MIN_PROBABILITY:
        raise ValueError(
            f"a normal with mean {mean} and std_dev {abs(std)} has no probability in [{lower}, {upper}]; "
            "widen the interval or use CONSTANT"
        )
    return [mean, std, cdf_lower, width, lower, upper]


_PACKERS: dict[DynamicEmbInitializerMode, tuple[int, Callable[[DynamicEmbInitializerArgs], list[float]]]] = {
    DynamicEmbInitializerMode.NORMAL: (NORMAL, _pack_normal),
    DynamicEmbInitializerMode.TRUNCATED_NORMAL: (TRUNCATED_NORMAL, _pack_truncated_normal),
    DynamicEmbInitializerMode.UNIFORM: (UNIFORM, _pack_uniform),
    DynamicEmbInitializerMode.CONSTANT: (CONSTANT, _pack_constant),
    DynamicEmbInitializerMode.DEBUG: (DEBUG, _pack_debug),
}
