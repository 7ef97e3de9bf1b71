from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.server.errors import ApiError
from sensorium.server.limits import ByteBudget, RequestQueue, WorkerPool


def test_queue_counts_and_refuses() -> None:
    queue = RequestQueue(2)
    with queue.slot(), queue.slot():
        with pytest.raises(ApiError) as refused:
            queue.check()
        assert refused.value.status == 429
    with pytest.raises(KeyError), queue.slot():
        raise KeyError
    assert queue.size == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=40))
def test_holdings_never_exceed_the_budget(steps: list[tuple[int, int]]) -> None:
    budget = ByteBudget(100)
    holdings = [budget.holding() for _ in range(3)]
    for which, amount in steps:
        if which == 3:
            holdings[amount % 3].release()
        else:
            before = holdings[which].amount
            taken = holdings[which].try_grow_to(amount)
            assert holdings[which].amount == (max(before, amount) if taken else before)
        assert budget.used == sum(holding.amount for holding in holdings) <= 100
    for holding in holdings:
        holding.release()
    assert budget.used == 0


def test_something_too_large_runs_alone() -> None:
    budget = ByteBudget(10)
    large, small = budget.holding(), budget.holding()
    assert large.try_grow_to(50)
    assert not small.try_grow_to(1)
    large.release()
    assert small.try_grow_to(1)


def test_waiting_is_first_come_first_served() -> None:
    async def scenario() -> list[str]:
        budget = ByteBudget(10)
        order: list[str] = []

        async def taker(name: str, amount: int) -> None:
            with budget.holding() as holding:
                await holding.take(amount)
                order.append(name)
                await asyncio.sleep(0.01)

        first = budget.holding()
        await first.take(8)
        tasks = [
            asyncio.create_task(taker(name, size)) for name, size in (("big", 9), ("small", 1), ("x", 3))
        ]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0.01)
        assert order == [], "small would fit, but big came first"
        first.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.used == 0
        return order

    assert asyncio.run(scenario()) == ["big", "small"]


def test_cancelled_as_it_is_served_gives_back() -> None:
    async def scenario() -> int:
        budget = ByteBudget(10)
        first, second = budget.holding(), budget.holding()
        await first.take(10)
        task = asyncio.create_task(second.take(5))
        await asyncio.sleep(0)
        first.release()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return budget.used

    assert asyncio.run(scenario()) == 0


def test_workers_do_not_block_the_loop_and_finish_what_they_began() -> None:
    async def scenario() -> None:
        pool = WorkerPool(1)
        ended = threading.Event()

        def work() -> str:
            time.sleep(0.2)
            ended.set()
            return "done"

        assert await pool.call(lambda: 3) == 3
        with pytest.raises(KeyError):
            await pool.call({}.__getitem__, "x")
        begun = asyncio.create_task(pool.call(work))
        queued = asyncio.create_task(pool.call(pytest.fail, "work not begun must be dropped"))
        await asyncio.sleep(0.05)
        assert not begun.done()
        queued.cancel()
        begun.cancel()
        await asyncio.gather(begun, queued, return_exceptions=True)
        assert ended.is_set()
        assert begun.cancelled()
        pool.shutdown()

    asyncio.run(scenario())
