"""Which files a dump has of a table, by their names alone; for scripts that read files themselves."""

from dynamicemb.checkpoint.disk.io import AnyPath, FileSystem, as_string, join
from dynamicemb.checkpoint.format import (
    COUNTER_FREQUENCIES,
    COUNTER_KEYS,
    ITEMS,
    KEYS,
    OPT_VALUES,
    SCORES,
    VALUES,
    parse_rank_file,
    rank_file,
)
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError

# The items of a dump's files, in the order of `get_loading_files`.
_LOADED = (KEYS, VALUES, SCORES, OPT_VALUES, COUNTER_KEYS, COUNTER_FREQUENCIES)
# Who has the first of a pair has the second.
_COMPANIONS = [(item, KEYS) for item in _LOADED[1:]]
_COMPANIONS += [(KEYS, VALUES), (COUNTER_KEYS, COUNTER_FREQUENCIES), (COUNTER_FREQUENCIES, COUNTER_KEYS)]
# The optimizer's files go by a shorter name too.
_ITEM_OF_SUFFIX = {**{item: item for item in ITEMS}, "opt_values": OPT_VALUES}


def find_files(root_path: AnyPath, table_name: str, suffix: str) -> tuple[list[str], int]:
    """Return the files of one kind that a folder has of a table, one of each rank that wrote it.

    Args:
        root_path: folder of a collection, or of a module's own dump.
        table_name: the table's name, taken letter by letter.
        suffix: the kind: ``emb_keys``, ``emb_values``, ``emb_scores``, ``opt_values`` (or ``emb_opt_values``),
            ``counter_keys``, ``counter_frequencies`` or ``emb_tombstones``.

    Returns:
        The paths in the order of the ranks, and their number; ``([], 0)`` if there are none.

    Raises:
        ValueError: another suffix.
        CheckpointCorruptError: the file of a rank is missing, or there are files of several world sizes; names it.
    """
    if suffix not in _ITEM_OF_SUFFIX:
        raise ValueError(f"suffix must be one of {', '.join(sorted(_ITEM_OF_SUFFIX))}, got {suffix!r}")
    item, root = _ITEM_OF_SUFFIX[suffix], as_string(root_path)
    parsed = [parse_rank_file(name) for name in FileSystem().entries(root) or {}]
    found = [file for file in parsed if file is not None and (file.table, file.item) == (table_name, item)]
    world_sizes = sorted({file.world_size for file in found})
    if not world_sizes:
        return [], 0
    if len(world_sizes) > 1:
        stray = next(file for file in found if file.world_size == world_sizes[0])
        path = join(root, rank_file(table_name, item, stray.rank, stray.world_size))
        raise CheckpointCorruptError(path, "files of one world size", f"files of {world_sizes}")
    (world_size,) = world_sizes
    ranks = {file.rank for file in found}
    paths = [join(root, rank_file(table_name, item, rank, world_size)) for rank in range(world_size)]
    for rank, path in enumerate(paths):
        if rank not in ranks:
            raise CheckpointCorruptError(path, "a file", "none")
    for rank in sorted(ranks - set(range(world_size))):
        path = join(root, rank_file(table_name, item, rank, world_size))
        raise CheckpointCorruptError(path, f"a rank below {world_size}", f"rank {rank}")
    return paths, world_size


def get_loading_files(
    root_path: AnyPath, name: str, rank: int, world_size: int
) -> tuple[list[str], list[str], list[str], list[str], list[str], list[str]]:
    """Return the files of a table that hold ids of one rank, or may hold some.

    Those are the rank's own files if as many ranks wrote the dump, and the files of all ranks otherwise. They are the
    rank's own only under the routing that the ranks had when they wrote; for another ``dist_type`` read them all.

    Args:
        root_path: folder of a collection, or of a module's own dump.
        name: the table's name.
        rank: who reads.
        world_size: how many read.

    Returns:
        Paths of keys, values, scores, optimizer states, keys of the counter and its frequencies. Lists of what the dump
        does not have are empty, all six if it does not have the table.

    Raises:
        ValueError: ``rank`` is not one of ``world_size``.
        DynamicEmbError: there is no folder ``root_path``.
        CheckpointCorruptError: files are missing, or belong to another world size; names one.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, the ranks of world_size={world_size}, got {rank}")
    if FileSystem().entries(as_string(root_path)) is None:
        raise DynamicEmbError(f"root_path {as_string(root_path)!r} does not exist; give the folder of a collection")
    found = {item: find_files(root_path, name, item) for item in _LOADED}
    _check_complete(as_string(root_path), name, found)
    mine = slice(rank, rank + 1) if found[KEYS][1] == world_size else slice(None)
    keys, values, scores, states, counter_keys, frequencies = (found[item][0][mine] for item in _LOADED)
    return keys, values, scores, states, counter_keys, frequencies


def _check_complete(root: str, name: str, found: dict[str, tuple[list[str], int]]) -> None:
    """Check that the files of a table are from equally many ranks, and that none is there without its companion.

    Raises:
        CheckpointCorruptError: names a file that is missing, or from another number of ranks.
    """
    for item, companion in _COMPANIONS:
        (paths, number), (others, expected) = found[item], found[companion]
        if number and not expected:
            path = join(root, rank_file(name, companion, 0, number))
            raise CheckpointCorruptError(path, f"a file beside {paths[0]!r}", "none")
        if number and number != expected:
            raise CheckpointCorruptError(paths[0], f"files of {expected} ranks, as {others[0]!r}", f"files of {number}")
