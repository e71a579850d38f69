import pytest

from kvasir.worker.block_pool import BlockPool, InvariantError


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_cached, pool.num_referenced


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.take(0) == ()
    taken = pool.take(2)
    assert taken is not None
    assert len(set(taken)) == 2
    assert pool.take(2) is None
    assert counts(pool) == (1, 0, 2)


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(1)
    assert pool.take(1) == (0,)
    pool.retain(0)
    pool.release(0, keep=False)
    assert (pool.references(0), counts(pool)) == (1, (0, 0, 1))
    pool.release(0, keep=False)
    assert (pool.references(0), counts(pool)) == (0, (1, 0, 0))


def test_a_kept_block_is_cached_until_retained_or_evicted() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.release(0, keep=True)
    assert counts(pool) == (0, 1, 0)
    pool.retain(0)
    assert counts(pool) == (0, 0, 1)
    pool.release(0, keep=True)
    assert pool.evict() == 0
    assert counts(pool) == (1, 0, 0)
    assert pool.evict() is None


def test_eviction_is_least_recently_released_first() -> None:
    pool = BlockPool(3)
    pool.take(3)
    for block in (1, 0, 2):
        pool.release(block, keep=True)
    pool.retain(1)
    pool.release(1, keep=True)
    assert [pool.evict(), pool.evict(), pool.evict()] == [0, 2, 1]


def test_misuse_is_a_broken_invariant() -> None:
    pool = BlockPool(2)
    with pytest.raises(InvariantError, match="more often"):
        pool.release(0, keep=False)
    with pytest.raises(InvariantError, match="is free"):
        pool.retain(0)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("_references", [-1, 0]),
        ("_references", [1, 0]),
        ("_free", [0, 0]),
        ("_free", [0]),
        ("_cached", {0: None}),
    ],
)
def test_check_finds_a_contradiction(attribute: str, value: object) -> None:
    pool = BlockPool(2)
    pool.check()
    setattr(pool, attribute, value)
    with pytest.raises(InvariantError):
        pool.check()
