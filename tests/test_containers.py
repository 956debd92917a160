"""What a container is, and how it is made again."""

import collections

import pytest
import tensorflow as tf

from tfloop._model.containers import is_container, items_of, parts_of, rebuilt

Pair = collections.namedtuple("Pair", "one two")


def wrapped(container):
    module = tf.Module()
    module.held = container
    return module.held


@pytest.mark.parametrize("as_it_is", [lambda container: container, wrapped])
@pytest.mark.parametrize(
    ("container", "items"),
    [
        ({"a": 1, "b": 2}, [("a", 1), ("b", 2)]),
        ([1, 2], [(0, 1), (1, 2)]),
        ((1, 2), [(0, 1), (1, 2)]),
        (Pair(1, 2), [(0, 1), (1, 2)]),
    ],
)
def test_a_container_is_made_again_in_its_form(container, items, as_it_is):
    held = as_it_is(container)
    assert is_container(held)
    assert items_of(held) == items
    assert parts_of(held) == [part for _, part in items]
    again = rebuilt(held, lambda part: part)
    assert again == container
    assert isinstance(again, type(container))


@pytest.mark.parametrize("thing", [None, 1, "ab", {1, 2}, tf.constant([1, 2])])
def test_anything_else_is_none(thing):
    assert not is_container(thing)
    assert parts_of(thing) is None
