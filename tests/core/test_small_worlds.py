"""Every small world there is: all orders of a few actions, and of when copies finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.core.world import Shape, World


class Choices:
    """Written as if random; enumerates every outcome, depth first."""

    def __init__(self, taken: list[int]) -> None:
        self.taken = taken
        self._widths: list[int] = []

    def choose(self, width: int) -> int:
        place = len(self._widths)
        if place == len(self.taken):
            self.taken.append(0)
        self._widths.append(width)
        return self.taken[place]

    def following(self) -> list[int] | None:
        """The choices of the next world; None after the last."""
        taken = self.taken[: len(self._widths)]
        while taken and taken[-1] + 1 == self._widths[len(taken) - 1]:
            taken.pop()
        if not taken:
            return None
        return [*taken[:-1], taken[-1] + 1]


def worlds() -> Iterator[Choices]:
    taken: list[int] | None = []
    while taken is not None:
        choices = Choices(taken)
        yield choices
        taken = choices.following()


def live(choices: Choices, shape: Shape, num_actions: int) -> World:
    world = World(0, shape)
    executor = world.executor

    def land_some() -> None:  # all copies under way, or none
        if executor._outstanding and choices.choose(2):
            for copy_id in list(executor._outstanding):
                executor._land(copy_id)

    executor._land_some = land_some  # type: ignore[method-assign]
    world.logs, world.commits = {"a": []}, {"a": [0]}
    world.submit("a", prompt=[1, 2, 3, 4], reply_max=1)
    world.step()
    for _ in range(num_actions):
        world.clock.advance(2.0)
        actions: list[Callable[[], object]] = [world.step]
        for name in list(world.logs):
            if name in world.turns:
                actions.append(lambda name=name: world.cancel(name))
            else:
                actions.append(lambda name=name: world.submit(name, prompt=[7], reply_max=1))
        if "a" not in world.turns and len(world.commits["a"]) > 1:
            actions.append(lambda: world.rewind("a", world.commits["a"][-2]))
        if "b" not in world.logs:
            actions.append(lambda: begin_b(world))
        actions[choices.choose(len(actions))]()
        world.scheduler.check(world.clock.now())
    world.settle()
    return world


def begin_b(world: World) -> None:
    """A second conversation: a fork of the first as far as it is committed, and its own words."""
    at = world.commits["a"][-1]
    world.logs["b"], world.commits["b"] = world.logs["a"][:at], [0, at] if at else [0]
    world.cache.fork("a", at, "b", world.clock.now())
    world.submit("b", prompt=[8, 9, 10, 11], reply_max=2)


def test_every_small_world_is_right() -> None:
    shape = Shape(device_pages=6, host_pages=1, chunk_tokens=2, batch_tokens_max=4, turns_max=2)
    count, happened = (
        0,
        dict.fromkeys(("swapped_out", "reclaimed", "dropped", "copied_on_write"), 0),
    )
    for choices in worlds():
        try:
            world = live(choices, shape, num_actions=5)
        except BaseException as error:
            error.add_note(f"choices {choices.taken}")
            raise
        count += 1
        for name in happened:
            happened[name] += getattr(world.cache.counters, name)
    assert count > 1500
    assert all(happened.values()), happened
